"""A database that is moved, deleted or replaced while it is in use: nothing is made in its place,
and nothing is written where it would be lost."""

from __future__ import annotations

import pytest
from tests.driving import Driver, column, ends, run_until_idle

from procession import App, Context
from procession.errors import StoreUnavailable


@pytest.fixture
def app(make):
    app = make()

    @app.consumer("q", name="c", session="s")
    def handle(message: dict, ctx: Context) -> None:
        ctx.execute("INSERT INTO effect (n) VALUES (:n)", n=message["n"])

    for n in range(10):
        app.send("q", {"s": "a", "n": n})
    return app


def move(app: App, folder) -> None:
    folder.mkdir()
    for part in app.database.parent.glob("t.db*"):
        part.rename(folder / part.name)


def put_back(app: App, folder) -> None:
    for part in folder.iterdir():
        part.rename(app.database.parent / part.name)


USES = {
    "send": lambda app: app.send("q", {"s": "a", "n": 99}),
    "status": lambda app: app.status(),
    "dead letters": lambda app: app.dead_letters(),
    "recorded": lambda app: app.recorded("c", "k"),
    "work": Driver,
    "skip": lambda app: app.skip_waits(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_file_that_was_moved_is_named_and_no_empty_one_takes_its_place(app, tmp_path, use):
    move(app, tmp_path / "elsewhere")
    with pytest.raises(StoreUnavailable, match=r"t\.db is gone.*put it back"):
        use(app)
    assert not app.database.exists()
    put_back(app, tmp_path / "elsewhere")
    run_until_idle(app)
    assert column(app, "SELECT n FROM effect") == list(range(10))


def test_a_lane_that_has_the_file_open_commits_nothing_into_a_deleted_one(app, tmp_path):
    with Driver(app) as driver:
        app.database.rename(tmp_path / "kept.db")
        with pytest.raises(StoreUnavailable, match="is gone"):
            driver.step()
        (tmp_path / "kept.db").rename(app.database)
        driver.run()
    assert ends(app) == {"processed": 10}


def test_a_file_that_was_replaced_is_not_worked_on(app, make, tmp_path):
    other = make(file="other.db")
    other.open()
    other.close()
    with Driver(app) as driver:
        app.database.rename(tmp_path / "kept.db")
        other.database.rename(app.database)
        with pytest.raises(StoreUnavailable, match="another file than the one that was opened"):
            driver.step()
        with pytest.raises(StoreUnavailable, match="replaced"):
            app.send("q", {"s": "a", "n": 99})
        app.database.rename(other.database)
        (tmp_path / "kept.db").rename(app.database)
        driver.run()
    assert column(app, "SELECT n FROM effect") == list(range(10))


def test_after_a_close_another_file_may_be_opened(app, tmp_path):
    app.close()
    move(app, tmp_path / "elsewhere")
    app.send("q", {"s": "a", "n": 1})
    assert [status.waiting for status in app.status()] == [1]


@pytest.mark.parametrize(
    "name", ["a b.db", "a#b.db", "a%20b.db", "ä.db", "a'b\".db", "a&mode=ro.db"]
)
def test_any_name_of_a_file_means_that_file(make, tmp_path, name):
    app = make(file=name)
    app.queue("q")
    app.send("q", {})
    assert (tmp_path / name).exists()
