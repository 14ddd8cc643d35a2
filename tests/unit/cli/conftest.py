import importlib
import io
import itertools
import sys
from dataclasses import dataclass
from textwrap import dedent

import pytest
from tests.driving import run_until_idle

from procession.cli import main

NUMBERS = itertools.count(1)

SHOP = """
    from dataclasses import dataclass
    from decimal import Decimal

    from procession import App, Reject, RetryPolicy

    app = App("shop", store="sqlite:///shop.db?synchronous=off", retry=RetryPolicy(max_attempts=1))
    ran = []

    @dataclass
    class Order:
        id: str
        client: str
        amount: Decimal
        note: str = ""

    def by_client(order):
        return order.client

    @app.consumer("orders", name="orders", session=by_client)
    def order(order: Order) -> None:
        if order.amount < 0:
            raise Reject(order.note or "an amount below zero")
        ran.append((order.id, order.amount))

    @app.consumer("files", name="files")
    def file(body: bytes) -> None:
        if body.startswith(b"\\xff"):
            raise Reject("no file")
        ran.append(body)
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


class Shell:
    """A folder with an app in it, in which commands are given."""

    def __init__(self, folder, capsys, monkeypatch):
        self.folder = folder
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        self.target = self.write(SHOP) + ":app"

    def write(self, text):
        """Write a module; return its name, which no other test uses."""
        name = f"module_{next(NUMBERS)}"
        (self.folder / f"{name}.py").write_text(dedent(text))
        return name

    @property
    def module(self):
        return importlib.import_module(self.target.split(":")[0])

    def __call__(self, *arguments, stdin=b""):
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        said = self._capsys.readouterr()
        return Result(code, said.out, said.err)

    def send(self, payload, *options):
        result = self("send", self.target, "orders", payload, *options)
        assert result.code == 0, result.err
        return result.out.strip()

    def work(self):
        run_until_idle(self.module.app)
        self.module.app.close()


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delenv("PROCESSION_APP", raising=False)
    return Shell(tmp_path, capsys, monkeypatch)
