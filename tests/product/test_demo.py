"""Promises of `make demo`: ours ends in agreement whatever it does to itself, and says so; where
its tables differ from the files, it says that, and its exit code does too. Consumers without an
inbox count wrong on the same ledgers, and that is no failure."""

import csv
import gzip
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from procession.demo import naive, run
from procession.demo.__main__ import main
from procession.demo.hostile import plan_hostility
from procession.demo.producer import Books

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "ledger"
DEMO = [sys.executable, "-m", "procession.demo"]
WORKERS = {b"procession.demo.worker", b"procession.demo.naive_worker"}


def cut(folder: Path, *, files: int, lines: int) -> Path:
    """Copy the first lines of the first example ledgers."""
    folder.mkdir()
    for path in sorted(EXAMPLES.glob("*.csv.gz"))[:files]:
        with gzip.open(path, "rt", encoding="utf-8") as ledger:
            text = "".join(line for _, line in zip(range(lines + 1), ledger, strict=False))
        (folder / path.name.removesuffix(".gz")).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return cut(tmp_path / "ledgers", files=3, lines=120)


def demo(*arguments: object, columns: int = 80) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DEMO, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "COLUMNS": str(columns)},
    )


def demo_json(*arguments: object, mode: str = "convoy") -> dict[str, Any]:
    done = demo("--json", "--mode", mode, *arguments)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def wait_for(condition: Any, *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes_on(database: Path) -> list[int]:
    """Return the workers of either kind that were started on this database."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if str(database).encode() in words and WORKERS & set(words):
            found.append(int(folder.name))
    return found


def check_books(result: dict[str, Any]) -> None:
    """Hold the reported numbers against each other."""
    assert result["ok"]
    lines, ledgers = result["input"]["transactions"], result["input"]["ledgers"]
    hostility, consumers = result["hostility"], result["consumers"]
    again, twice = hostility["transactions_sent_again"], len(hostility["ledgers_sent_twice"])
    assert again >= lines // 10
    assert twice >= ledgers // 3
    conflicts = int(hostility["conflict"] is not None)
    corrupted = int(hostility["corrupted"] is not None)
    expected = {
        "split": (ledgers + twice, ledgers, twice, 0, 0, 0),
        "apply": (lines + again, lines, again - conflicts, conflicts, corrupted, corrupted),
        "audit": (lines + again, lines, again - conflicts, conflicts, 0, 0),
    }
    columns = ("sent", "processed", "duplicate", "conflict", "dead_lettered", "replayed")
    assert {
        name: tuple(numbers[column] for column in columns) for name, numbers in consumers.items()
    } == expected
    for numbers in consumers.values():
        assert sum(numbers["duplicates_by_cause"].values()) == numbers["duplicate"]
        assert numbers["unfinished"] == 0
    assert result["takeovers"] >= result["kills"]
    assert all(each["ok"] for each in result["comparison"]["checks"])
    assert result["comparison"]["differences"] == []


def test_a_small_folder_ends_in_agreement_with_every_message_accounted_for(data: Path) -> None:
    result = demo_json("--data", data, "--kills", 2)

    check_books(result)
    assert result["input"]["transactions"] == 360
    assert result["kills"] == 2
    assert result["hostility"]["conflict"]
    assert result["hostility"]["corrupted"]


@pytest.mark.parametrize("seed", range(1, 5))
def test_kills_at_other_moments_never_change_the_totals(tmp_path: Path, seed: int) -> None:
    data = cut(tmp_path / "ledgers", files=6, lines=800)

    result = demo_json("--data", data, "--kills", 5, "--seed", seed, "--processes", 1 + seed % 3)

    check_books(result)
    assert result["kills"] == 5


@pytest.mark.timeout(240)
def test_the_whole_month_ends_in_agreement_within_a_minute() -> None:
    result = demo_json(mode="all")

    check_books(result)
    assert result["kills"] == 3
    assert result["input"] == {
        "ledgers": 20,
        "transactions": 42_481,
        "invoices": 2_025,
        "processes": 2,
        "seed": 1,
    }
    assert result["serial_stage"]["messages"] == 42_481
    assert result["parallel_stage"]["messages"] == 2 * (42_481 + 4_248)

    modes = result["modes"]
    assert [mode["true_total_thousandths"] for mode in modes.values()] == [150_463_300] * 3
    for mode in (modes["naive"], modes["single"]):
        assert mode["difference_thousandths"] > 0
        assert mode["lines_counted_twice"] > 742
        assert mode["lines_lost"] == 0
    assert modes["naive"]["orders_out_of_sequence"] > 0
    assert modes["single"]["orders_out_of_sequence"] == 0
    every = modes["convoy"].pop("all_ledgers")
    assert every["true_total_thousandths"] == every["counted_total_thousandths"] == 748_957_020
    for ours in (modes["convoy"], every):
        assert ours["difference_thousandths"] == ours["orders_out_of_sequence"] == 0
        assert ours["lines_counted_twice"] == ours["lines_lost"] == 0


def test_a_single_consumer_counts_exactly_what_it_is_sent_in_the_files_order(data: Path) -> None:
    books = Books(data)
    plan = plan_hostility(books.ledgers, seed=5, kills=0)
    again = {(line.ledger, line.line_number) for lines in plan.again.values() for line in lines}
    whole = {(line.ledger, line.line_number) for line in books.lines if line.ledger in plan.twice}

    result = demo_json("--data", data, "--kills", 0, "--seed", 5, mode="single")

    assert result["ok"]
    assert list(result["modes"]) == ["single"]
    single = result["modes"]["single"]
    sent = [*books.lines, *(line for line in books.lines if line.ledger in plan.twice)]
    sent += [line for lines in plan.again.values() for line in lines]
    counted = sum(int(line.quantity) * Decimal(line.unit_price) * 1000 for line in sent)
    assert single["counted_total_thousandths"] == counted
    assert single["lines_counted_twice"] == len(again | whole)
    assert (single["orders_out_of_sequence"], single["lines_lost"]) == (0, 0)


@pytest.mark.parametrize("mode", ["naive", "single"])
def test_consumers_that_are_killed_lose_nothing_and_their_errors_are_no_failure(
    tmp_path: Path, data: Path, mode: str
) -> None:
    database = tmp_path / "demo.db"

    result = demo_json("--data", data, "--kills", 4, "--database", database, mode=mode)

    counted = result["modes"][mode]
    assert result["ok"]
    assert counted["kills"] == 4
    assert counted["lines_lost"] == 0
    assert counted["lines_counted_twice"] >= 120
    with closing(sqlite3.connect(tmp_path / f"demo-{mode}.db")) as connection:
        (total,) = connection.execute("SELECT sum(total_thousandths) FROM orders").fetchone()
    assert total == counted["counted_total_thousandths"]
    assert sorted(path.name for path in tmp_path.glob("*.db*")) == [f"demo-{mode}.db"]


def test_one_line_is_enough(tmp_path: Path) -> None:
    result = demo_json("--data", cut(tmp_path / "ledgers", files=1, lines=1))

    check_books(result)
    assert result["kills"] == 3
    assert result["hostility"]["transactions_sent_again"] == 1


def test_no_line_at_all_is_no_error(tmp_path: Path) -> None:
    check_books(demo_json("--data", cut(tmp_path / "ledgers", files=2, lines=0)))


def test_the_kept_database_holds_the_totals_of_the_files(tmp_path: Path, data: Path) -> None:
    database = tmp_path / "kept.db"
    done = demo("--data", data, "--database", database, "--kills", 1, "--mode", "convoy")
    assert done.returncode == 0, done.stderr

    lines: Counter[str] = Counter()
    totals: dict[str, Decimal] = {}
    stock: Counter[str] = Counter()
    for path in data.iterdir():
        with path.open(encoding="utf-8", newline="") as ledger:
            for row in csv.DictReader(ledger):
                quantity, invoice_no = int(row["Quantity"]), row["InvoiceNo"]
                lines[invoice_no] += 1
                stock[row["StockCode"]] += quantity
                amount = quantity * Decimal(row["UnitPrice"]) * 1000
                totals[invoice_no] = totals.get(invoice_no, Decimal(0)) + amount
    with closing(sqlite3.connect(database)) as connection:
        read = connection.execute
        assert dict(read("SELECT invoice_no, lines FROM orders")) == lines
        assert dict(read("SELECT invoice_no, total_thousandths FROM orders")) == totals
        assert dict(read("SELECT stock_code, quantity FROM stock")) == stock
        assert read("SELECT sum(replayed), count(*) FROM order_lines").fetchone() == (1, 360)
    assert not processes_on(database)


def test_it_tells_all_that_it_does_to_itself_in_plain_lines(data: Path) -> None:
    text = demo("--data", data, "--kills", 1, columns=40).stdout

    assert "\x1b" not in text
    for told in (
        "3 ledgers, 360 transactions, ",
        "Competing consumers: ",
        "100 %: naive",
        "A single consumer: ",
        "100 %: single",
        "Procession: an inbox and one session an order",
        "every third of them twice",
        "a bad wire damaged line",
        "again from outside",
        "has the same id and another payload",
        "with SIGKILL after",
        "was taken over within",
        "dead letter of apply, invalid-payload: ",
        "edited the dead letter back",
        "replayed it into its session",
        "100 %: serial",
        "2 conflicts stay as dead letters",
        "✓ stock per item",
        "The first 3 ledgers, in pounds and",
        "  out of sequence",
    ):
        assert told in text.replace("\n", " ") or told in text
    table = text[text.index("\nmessages ") :]
    assert max(map(len, table.splitlines())) <= 40


def test_a_terminal_gets_a_progress_bar(data: Path) -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*DEMO, "--data", str(data), "--kills", "0"],
        stdout=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "40"},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
    os.close(ours)

    assert process.returncode == 0
    assert "━".encode() in shown
    assert b"parallel" in shown
    assert b"\x1b[" in shown


def test_json_is_one_object_on_standard_output_and_nothing_else(data: Path) -> None:
    done = demo("--json", "--data", data, "--kills", 0, "--mode", "convoy")

    assert isinstance(json.loads(done.stdout), dict)
    assert "sent 3 ledgers" in done.stderr
    assert "✓ stock per item" in done.stderr


def test_a_difference_is_told_and_exits_with_1(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # where a worker finds the module
    monkeypatch.setattr(run, "WORKER_MODULE", "tests.product.wrong_worker")

    code = main(["--data", str(data), "--kills", "0", "--json", "--mode", "convoy"])

    told = capsys.readouterr()
    result = json.loads(told.out)
    wrong = {each["name"] for each in result["comparison"]["checks"] if not each["ok"]}
    assert code == 1
    assert result["ok"] is False
    assert result["modes"]["convoy"]["lines_counted_twice"] == 3
    assert {"number of lines", "lines per invoice", "total per invoice", "stock per item"} <= wrong
    assert "✗ number of lines" in told.err
    assert "number of lines: rows of line 2010-12-01/5: 1 expected, 2 found" in told.err


@pytest.mark.parametrize(
    ("module", "name", "mode"),
    [(run, "WORKER_MODULE", "convoy"), (naive, "NAIVE_WORKER_MODULE", "all")],
)
def test_workers_that_cannot_start_end_the_demo_with_their_own_words(
    module: Any,
    name: str,
    mode: str,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, name, "procession.demo.no_such_worker")

    assert main(["--data", str(data), "--mode", mode]) == 1
    assert "No module named procession.demo.no_such_worker" in capsys.readouterr().err


def test_workers_that_fail_for_ever_are_told_with_their_fault(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run, "WORKER_MODULE", "tests.product.faulty_worker")
    monkeypatch.setattr(run, "STALL_S", 2.0)

    assert main(["--data", str(data), "--mode", "convoy"]) == 1

    told = capsys.readouterr()
    assert "a lane of split pauses: NameError: no such name" in told.out
    assert "nothing has ended for 2 s" in told.err
    assert "split: 4 waiting" in told.err


def test_what_cannot_be_done_is_refused_before_anything_is_sent(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken.db"
    taken.touch()
    (tmp_path / "free-single.db").touch()
    bad = cut(tmp_path / "bad", files=1, lines=3)
    (bad / "late.csv").write_text("InvoiceNo,StockCode,Quantity,UnitPrice\n1,a,six,2.55\n")
    odd = cut(tmp_path / "odd", files=1, lines=3)
    (odd / "late.csv").write_text(f"InvoiceNo,StockCode,Quantity,UnitPrice\n{'9' * 600},a,6,2.55\n")
    for arguments, fault in (
        (["--data", tmp_path / "absent"], "no ledgers in"),
        (["--data", data, "--database", taken], "exists already"),
        (["--data", data, "--database", tmp_path / "free.db"], "free-single.db exists already"),
        (["--data", data, "--database", tmp_path / "no" / "file.db"], "its folder does not exist"),
        (["--data", data, "--database", tmp_path / "a?synchronous=full"], "plainer name"),
        (["--data", bad], "ledger 'late', line 1: Quantity 'six'"),
        (["--data", odd], "ledger 'late', line 1: "),
    ):
        assert main(list(map(str, arguments))) == 2
        told = capsys.readouterr()
        assert fault in told.err
        assert "Traceback" not in told.err
        assert "Competing" not in told.out
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("mode", "name"), [("convoy", "demo.db"), ("naive", "demo-naive.db")])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_whatever_ends_the_demo_ends_its_workers(
    tmp_path: Path, number: signal.Signals, code: int, mode: str, name: str
) -> None:
    database = tmp_path / name
    with subprocess.Popen(
        [*DEMO, "--database", str(tmp_path / "demo.db"), "--mode", mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: len(processes_on(database)) == 2)
        time.sleep(1.0)  # let them get to work
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)

    assert process.returncode == code
    assert "Traceback" not in errors
    wait_for(lambda: not processes_on(database))


def test_a_reader_that_has_seen_enough_ends_the_demo_quietly(data: Path) -> None:
    with subprocess.Popen(
        [*DEMO, "--data", str(data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "3 ledgers" in process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()

    assert process.returncode == 141
    assert errors == ""
