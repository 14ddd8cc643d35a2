import sys

import pytest

from procession.cli import main


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere:app", "there is no module 'nowhere'"),
        ("orders", "write module:app"),
        ("orders.py:app", "as in orders:app"),
        ("src/orders.py:app", "as in src.orders:app"),
        ("os:path", "it is a module; it has no App"),
        (":app", "write module:app"),
        ("orders:", "write module:app"),
    ],
)
def test_a_target_that_is_none_is_explained(shell, target, says):
    result = shell("status", target)
    assert result.code == 2
    assert says in result.err
    assert result.err.count("\n") == 1


def test_the_apps_of_a_module_are_named_where_another_was_asked_for(shell):
    module = shell.target.split(":")[0]
    result = shell("status", f"{module}:shop")
    assert result.code == 2
    assert f"it has {module}:app" in result.err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_this_name", "it needs 'nothing_of_this_name'"),
        ("def f():\n    return unknown\nf()", "NameError: name 'unknown' is not defined"),
        ("import sys; sys.exit(1)", "ends the program when it is imported"),
        ("def f(:", "SyntaxError"),
        ("from procession import App\napp = App('', store='memory://')", "app ''"),
        ("from procession import App\napp = App('x', store='memory://')", "store on disk"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_line(shell, text, says):
    module = shell.write(text)
    result = shell("status", f"{module}:app")
    assert result.code == 2
    assert says in result.err
    assert module in result.err
    assert result.err.count("\n") == 1


def test_a_password_in_a_store_url_is_not_told_by_an_error(shell):
    module = shell.write(
        "from procession import App\napp = App('x', store='oracle://ada:secret@db/x')"
    )
    result = shell("status", f"{module}:app")
    assert result.code == 2
    assert "oracle://ada:***@db/x" in result.err
    assert "secret" not in result.err


def test_the_environment_may_name_the_app(shell, monkeypatch):
    monkeypatch.setenv("PROCESSION_APP", shell.target)
    assert shell("status").code == 0
    assert shell("send", "files", "abc").code == 0
    assert shell("dead-letters", "list").code == 0
    assert shell("dead-letters", "show", "7").code == 1
    assert "no dead letter 7" in shell("dead-letters", "replay", "7").out
    # An app that is named all the same goes before.
    assert "no module 'elsewhere'" in shell("status", "elsewhere:app").err


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("run",),
        ("migrate",),
        ("send",),
        ("dead-letters", "list"),
        ("dead-letters", "show"),
        ("dead-letters", "edit"),
        ("dead-letters", "replay"),
        ("dead-letters", "discard", "--why", "x"),
    ],
)
def test_without_a_target_the_command_says_how_it_is_called(shell, command):
    result = shell(*command)
    assert result.code == 2
    assert "TARGET" in result.err
    assert "PROCESSION_APP" in result.err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra_the_command_says_what_to_install(package, monkeypatch, capsys):
    for name in list(sys.modules):
        if name.split(".")[0] == package or name.startswith("procession.cli."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert main(["status", "orders:app"]) == 2
    said = capsys.readouterr()
    assert said.err == (
        f"procession: the commands need {package}, which is not installed: "
        "pip install 'procession[cli]'\n"
    )
