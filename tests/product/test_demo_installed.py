"""Promises of `procession demo` as a wheel brings it: one day is shipped, no repository needed."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Build the wheel and install it alone; return the folder of the commands.

    What it depends on is lent by this environment, so that no network is needed. This environment's
    own link to the checkout is not: only the folders that Python itself knows have such links read.
    """
    wheels, environment = tmp_path / "wheels", tmp_path / "environment"
    for command in (
        (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", wheels, ROOT),
        (sys.executable, "-m", "venv", environment),
    ):
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    python = environment / "bin" / "python"
    done = run(python, "-m", "pip", "install", "--no-deps", *wheels.iterdir(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


def test_a_wheel_without_the_repository_plays_the_day_that_it_brings(
    installed: Path, tmp_path: Path
) -> None:
    where = run(
        installed / "python", "-c", "import procession; print(procession.__file__)", cwd=tmp_path
    )
    assert where.stdout.startswith(str(installed.parent))

    done = run(installed / "procession", "demo", "--json", "--kills", 1, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["ok"]
    assert result["input"]["ledgers"] == 1
    assert result["input"]["transactions"] == 3_108
    assert list(result["modes"]) == ["naive", "single", "convoy"]
    assert result["modes"]["naive"]["difference_thousandths"] > 0
    assert result["modes"]["single"]["orders_out_of_sequence"] == 0
    assert result["modes"]["convoy"]["difference_thousandths"] == 0
    assert {mode["kills"] for mode in result["modes"].values()} == {1}
