"""The documents say what the code does: their examples run, their lists are whole, what they name
exists. Each page is read as it stands; nothing is generated.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

import procession
import procession.telemetry
import procession.testing
from procession import Cause, End, Event, Reason, RetryPolicy, Settings, Standing
from procession.cli.commands import commands

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "procession"
README = ROOT / "README.md"
PAGES = sorted(
    [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")]
)
EXAMPLES = ROOT / "examples"
# A block may say why it is not run: <!-- not run: the reason --> in the line before it.
BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>.+) -->\n+)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[re.Match[str]]:
    return [
        found for found in BLOCK.finditer(page.read_text("utf-8")) if found["language"] in languages
    ]


def section(page: str, title: str) -> str:
    """Return what stands under a heading, up to the next heading of its level or above."""
    text = (ROOT / page).read_text("utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found is not None, f"{page} has no heading {title!r}"
    rest = text[found.end() :]
    after = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: after.start()] if after else rest


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of a text's tables, without heads and rules."""
    found = [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)]
        for line in ROW.findall(text)
    ]
    rules = [number for number, cells in enumerate(found) if not set("".join(cells)) - set("-: ")]
    skipped = {*rules, *(number - 1 for number in rules)}
    return [cells for number, cells in enumerate(found) if number not in skipped]


def code(cell: str) -> str:
    assert re.fullmatch(r"`[^`]+`", cell), f"{cell!r} is to be one name in backticks"
    return cell.strip("`")


def shown(value: object) -> str:
    """Return a value as the tables write it."""
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else f"{value:,}"


# ---- examples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """In their order and on one namespace, as a reader would; then what they define as tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "quickstart", raising=False)
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    text = page.read_text("utf-8")
    for block in blocks(page, "python"):
        # The line numbers of an error are then those of the page.
        code_text = "\n" * text[: block.start("text")].count("\n") + block["text"]
        compiled = compile(code_text, name_of(page), "exec")
        if not block["why"]:
            exec(compiled, module.__dict__)
    for name, found in list(vars(module).items()):
        if name.startswith("test_"):
            found()


def test_the_readmes_example_is_the_file():
    texts = [block["text"] for block in blocks(README, "python")]
    assert (EXAMPLES / "quickstart.py").read_text("utf-8") in texts


@pytest.mark.slow
def test_the_readmes_example_survives_kill_9(tmp_path):
    """What the README tells its reader to do ends as it says."""
    shutil.copy(EXAMPLES / "quickstart.py", tmp_path)
    for _ in range(2):
        sent = subprocess.run(
            [sys.executable, "quickstart.py"], cwd=tmp_path, capture_output=True, check=True
        )
        assert sent.stdout == b"100000 sent\n"
    with running(tmp_path) as first:
        wait_until(lambda: ended(tmp_path) > 1_000)
        os.killpg(first.pid, signal.SIGKILL)
    before = ended(tmp_path)
    assert before < 200_000
    with running(tmp_path) as second:
        wait_until(lambda: ended(tmp_path) == 200_000)
        second.send_signal(signal.SIGTERM)
        assert second.wait(30) == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "bank.db")) as bank:
        found = bank.execute("SELECT sum(pence), min(last) FROM accounts").fetchone()
    assert "{}|{}".format(*found) in README.read_text("utf-8")
    assert found == (500_000, 99_901)


@contextlib.contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "procession.cli", "run", "quickstart:app", "--processes", "2"]
    with subprocess.Popen(
        [*command, "--log-level", "error"], cwd=folder, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def ended(folder: Path) -> int:
    command = [sys.executable, "-m", "procession.cli", "status", "quickstart:app", "--json"]
    told = subprocess.run(command, cwd=folder, capture_output=True, check=True).stdout
    (consumer,) = json.loads(told)["consumers"]
    return sum(end["total"] for end in consumer["ended"].values())


def wait_until(true: Any) -> None:
    give_up = time.monotonic() + 60
    while not true():
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.mark.parametrize(
    "file",
    [
        file
        for file in sorted(SOURCE.rglob("*.py"))
        if ">>>" in file.read_text("utf-8") and "conformance" not in file.parts
    ],
    ids=name_of,
)
def test_the_examples_of_a_module_run(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    module = importlib.import_module(name.removesuffix(".__init__"))
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0


@pytest.mark.parametrize("package", [procession, procession.testing], ids=lambda one: one.__name__)
def test_every_public_name_is_documented(package):
    assert [name for name in package.__all__ if not getattr(package, name).__doc__] == []


# ---- commands ------------------------------------------------------------------------------------


def test_every_command_on_a_page_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    made = [words[1] for _, words in shell_lines("make")]
    assert set(made) <= targets
    called = list(shell_lines("procession"))
    for where, words in called:
        check_options(typer.main.get_command(commands), words[1:], where)
    assert made
    assert called


def shell_lines(program: str) -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in blocks(page, "sh"):
            for line in block["text"].splitlines():
                words = line.split("&")[0].split()
                if words[:1] == [program]:
                    yield f"{name_of(page)}: {line}", words


def check_options(command: Any, words: list[str], where: str) -> None:
    while hasattr(command, "commands"):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    given = {word.split("=")[0] for word in words if word.startswith("-") and word != "-"}
    assert given <= known, where


def test_every_command_stands_in_the_readme():
    listed = {code(cells[0]) for cells in rows(section("README.md", "Commands"))}
    assert listed == {
        f"procession {path}" for path in paths(typer.main.get_command(commands), prefix="")
    }


def paths(command: Any, *, prefix: str) -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield prefix
        return
    for name, inner in command.commands.items():
        yield from paths(inner, prefix=f"{prefix} {name}".strip())


def test_every_make_target_stands_in_the_contributing_page():
    helped = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    listed = {code(cells[0]) for cells in rows(section("CONTRIBUTING.md", "Make"))}
    assert listed | {"make help"} == {f"make {target}" for target in helped}


# ---- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "made"), [("Settings", Settings()), ("Retry policy", RetryPolicy())]
)
def test_every_setting_stands_in_the_defaults(title, made):
    listed = {
        code(cells[0]): cells[1] for cells in rows(section("docs/defaults.md", title)) if cells[2]
    }
    assert listed == {field.name: shown(getattr(made, field.name)) for field in fields(made)}


# What is no limit: exit codes, and numbers that are stored.
NO_LIMITS = re.compile(r"EXIT_\w+|SCHEMA_VERSION|FOREIGN")
# Their numbers shape what is printed, or bound a demonstration or a test.
NO_LIMITS_IN = {"cli", "demo", "testing"}


def test_every_limit_stands_in_the_defaults():
    listed = {}
    for cells in rows(section("docs/defaults.md", "Constants")):
        assert cells[2], f"{cells[0]} needs its reason"
        listed[code(cells[0])] = cells[1]
    assert listed == dict(limits())


def limits() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE).with_suffix("")
        if place.parts[0] in NO_LIMITS_IN:
            continue
        path = ".".join(place.parts).removesuffix("__init__").rstrip(".")
        module = importlib.import_module(f"procession.{path}".rstrip("."))
        for name in module_names(ast.parse(file.read_text("utf-8"))):
            value = getattr(module, name)
            numbers = value if isinstance(value, tuple) else (value,)
            if (
                re.fullmatch(r"[A-Z][A-Z0-9_]+", name)
                and not NO_LIMITS.fullmatch(name)
                and numbers
                and all(type(number) in (int, float) for number in numbers)
            ):
                yield f"{path}.{name}", shown(value)


def module_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


# ---- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("Ends", End),
        ("Standings", Standing),
        ("Causes of duplicates", Cause),
        ("Reasons of dead letters", Reason),
    ],
)
def test_every_word_of_a_closed_list_stands_in_the_glossary(title, words):
    listed = [code(cells[0]) for cells in rows(section("docs/glossary.md", title))]
    assert sorted(listed) == sorted(word.value for word in words)


def test_every_event_stands_in_the_glossary_as_in_the_code():
    table = {cells[0]: cells[1] for cells in rows(section("docs/glossary.md", "Events"))}
    assert table == {cells[0]: cells[1] for cells in rows(procession.telemetry.__doc__ or "")}
    named = [name for cell in table for name in re.findall(r"`([a-z._]+)`", cell)]
    assert sorted(named) == sorted(event.value for event in Event)


def test_the_fields_of_every_event_are_those_of_the_code():
    listed = {cells[0]: cells[3] for cells in rows(section("docs/observability.md", "Events"))}
    for names, _, told in rows(procession.telemetry.__doc__ or ""):
        for name in re.findall(r"`[a-z._]+`", names):
            assert listed[name] == told, name


# ---- tests that are named ------------------------------------------------------------------------


def defined() -> dict[str, set[str]]:
    """Return the names of all tests, and the files in which each is."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    files = [*ROOT.glob("tests/**/test_*.py"), *SOURCE.glob("testing/conformance/*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name].add(name_of(file))
    return found


TESTS = defined()
NAMED = re.compile(r"`(test_\w+)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_test_that_a_page_names_exists(page):
    named = NAMED.findall(page.read_text("utf-8"))
    assert [name for name in named if name not in TESTS] == []


@pytest.mark.parametrize("number", range(1, 13))
def test_every_guarantee_names_its_proof(number):
    text = (ROOT / "docs/guarantees.md").read_text("utf-8")
    (title,) = re.findall(rf"^## (G{number} .+)$", text, re.MULTILINE)
    table = dict(rows(section("docs/guarantees.md", title)))
    assert NAMED.search(table["proof"])
    assert re.search(r"\b[IRC]\d", table["points"])


CASES = {
    cells[0]: cells
    for cells in rows((ROOT / "docs/field-cases.md").read_text("utf-8"))
    if re.fullmatch(r"[A-Z]\d\d", cells[0])
}


def test_the_field_cases_are_all_there_and_each_is_held_or_promised():
    assert len(CASES) == 91
    for case, (_, what, source, held) in CASES.items():
        assert what, case
        assert re.fullmatch(r"\[.+\]\(https://.+\)", source), case
        assert NAMED.search(held) or "comes with" in held, case


def test_a_test_of_a_field_case_stands_with_its_case():
    by_case = defaultdict(set)
    for name in TESTS:
        if found := re.match(r"test_([A-Z]\d\d)_", name, re.IGNORECASE):
            by_case[found[1].upper()].add(name)
    lacking = [
        case
        for case, names in by_case.items()
        if case in CASES and not names & set(NAMED.findall(CASES[case][3]))
    ]
    assert lacking == []


def test_every_point_of_the_patterns_is_answered():
    listed = [cells[0] for cells in rows((ROOT / "docs/patterns.md").read_text("utf-8"))]
    last = {"I": 21, "R": 12, "C": 19}
    assert listed == [f"{part}{n}" for part in last for n in range(1, last[part] + 1)]


# ---- pages ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", other.read_text("utf-8"), re.MULTILINE)
            assert anchor in {title.lower().replace(" ", "-") for title in titles}, target


def test_every_decision_stands_in_the_list():
    folder = ROOT / "docs" / "adr"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text("utf-8"))
    assert listed == sorted(file.name for file in folder.glob("0*.md"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_promises_what_nobody_can(page):
    assert "exactly once" not in page.read_text("utf-8").lower().replace("-", " ")
