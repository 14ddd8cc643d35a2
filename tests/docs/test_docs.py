"""The documents say what the code does: their examples run, their lists are whole, what they name
exists. Each page is read as it stands; nothing is generated.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import click
import pytest
import typer.main

import procession
import procession.testing
from procession import Cause, End, Event, Reason, RetryPolicy, Settings, Standing, telemetry
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
ROW = re.compile(r"^\| (.+) \|$", re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[re.Match[str]]:
    return [
        found
        for found in BLOCK.finditer(page.read_text("utf-8"))
        if found["language"] in languages
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


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python", "py")], ids=name_of
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """In their order and on one namespace, as a reader would; then what they define as tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    for block in blocks(page, "python", "py"):
        if block["why"]:
            compile(block["text"], name_of(page), "exec")
            continue
        line = page.read_text("utf-8")[: block.start("text")].count("\n")
        exec(compile("\n" * line + block["text"], name_of(page), "exec"), module.__dict__)
    for name, found in list(module.__dict__.items()):
        if name.startswith("test_"):
            found()
    sys.modules.pop("quickstart", None)


def test_the_readmes_example_is_the_file():
    assert (EXAMPLES / "quickstart.py").read_text("utf-8") in [
        block["text"] for block in blocks(README, "python")
    ]


def test_every_command_on_a_page_exists():
    known = typer.main.get_command(commands)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    found = 0
    for page in PAGES:
        for block in blocks(page, "sh", "console"):
            for line in block["text"].splitlines():
                words = line.removeprefix("$ ").split()
                if words[:1] == ["procession"]:
                    check_options(known, words[1:], f"{name_of(page)}: {line}")
                    found += 1
                if words[:1] == ["make"]:
                    assert words[1] in targets, f"{name_of(page)}: {line}"
                    found += 1
    assert found > 10


def check_options(command: click.Command, words: list[str], where: str) -> None:
    while isinstance(command, click.Group):
        assert words[0] in command.commands, where
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    given = {word.split("=")[0] for word in words if word.startswith("-") and word != "-"}
    assert command.name == "demo" or given <= known, where


def test_every_command_stands_in_the_readme():
    listed = {code(cells[0]) for cells in rows(section("README.md", "Commands"))}
    assert listed == {f"procession {name}" for name in paths(typer.main.get_command(commands))}


def paths(command: click.Command) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from (f"{name} {path}".strip() for path in paths(inner))
    else:
        yield ""


MODULES = [
    found.name
    for found in pkgutil.walk_packages([str(SOURCE)], "procession.")
    if ">>>" in inspect.getsource(importlib.util.find_spec(found.name).loader.load_module())  # type: ignore
]
