"""One connection: how it is opened, how it takes its turn to write, what its errors mean.

Every write transaction goes through the turnstile, an advisory lock on a file beside the
database: SQLite's own busy handler lets processes starve, the turnstile does not.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import threading
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl, quote

from procession.errors import (
    ConfigurationError,
    Contention,
    ProcessionError,
    StoreUnavailable,
    TransactionMisuse,
)

BUSY_POLL_S = 0.0005
# How many times `busy_s` a process waits at the turnstile before it takes whoever stands in it for
# stopped, and goes around.
TURNSTILE_WAITS = 2
WAL_PAGES = 4_000
CACHE_KIB = 16_384
CACHED_STATEMENTS = 512
URL_BEGIN = "sqlite:///"
SQLITE_NEEDED = (3, 37)
# The primary code is the low byte of an extended one (sqlite.org/rescode.html).
_CONTENTION = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_UNAVAILABLE = {
    sqlite3.SQLITE_FULL: "the disk, or the database's page limit, is full: free some space",
    sqlite3.SQLITE_IOERR: "reading or writing the file failed: check the disk",
    sqlite3.SQLITE_CANTOPEN: "the file cannot be opened: check its path and permissions, "
    "and those of its -wal and -shm files",
    sqlite3.SQLITE_READONLY: "the file or its folder cannot be written: check the "
    "permissions, and those of its -wal and -shm files",
    sqlite3.SQLITE_CORRUPT: "the file is damaged: restore it from a backup",
    sqlite3.SQLITE_PROTOCOL: "the locking protocol failed: the file must be on a local disk",
    sqlite3.SQLITE_NOMEM: "memory ran out",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the database is and how it is opened.

    Attributes:
        path: the file.
        synchronous: FULL (the default) survives a power cut; NORMAL may lose the last commits in
            one; OFF is for tests.
        foreign_keys: whether handlers' statements are held to foreign keys. Default: they are.
        busy_s: how long to wait for a foreign lock, seconds.
        file: device and number of the file that the store opened first, so that no other one, and
            no fresh and empty one, is ever taken for it; None until then.
    """

    path: Path
    synchronous: str = "FULL"
    foreign_keys: bool = True
    busy_s: float = 5.0
    file: tuple[int, int] | None = None

    def settled(self) -> Place:
        """Return the place as that of the very file that is there now.

        Raises:
            StoreUnavailable: there is none.
        """
        found = self._found()
        if found is None:
            raise StoreUnavailable(f"database {self.path} is gone: it was moved or deleted")
        return replace(self, file=found)

    def check(self) -> None:
        """Refuse to go on where the file is another one than at first, or gone: whatever is
        written to an unlinked file is lost, and a fresh one knows of nothing that was done.

        Raises:
            StoreUnavailable: so it is; it passes when the file is back.
        """
        if self.file is None:
            return
        found = self._found()
        if found == self.file:
            return
        if found is None:
            raise StoreUnavailable(
                f"database {self.path} is gone: it was moved or deleted while in use. Nothing is "
                "made in its place; put it back with its -wal file, or restart to begin a new one"
            )
        raise StoreUnavailable(
            f"database {self.path} is another file than the one that was opened: it was replaced "
            "while in use. Put the first one back, or restart to work on this one"
        )

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)  # noqa: PTH116  in every transaction, and quicker
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(
                f"database {self.path} cannot be reached: {error.strerror}"
            ) from error
        return found.st_dev, found.st_ino

    @staticmethod
    def of_url(url: str, *, busy_s: float = 5.0) -> Place:
        """Read `sqlite:///relative.db` or `sqlite:////absolute.db`, with `?synchronous=` and
        `?foreign_keys=`.

        Raises:
            ConfigurationError: anything else; all faults are named.
        """
        # Not urlsplit: a file's name may hold a # or a %, and means just these.
        where, _, query = url.partition("?")
        path = where.removeprefix(URL_BEGIN)
        if path in (where, ""):
            raise ConfigurationError(
                f"store {url!r}: write sqlite:///file.db for a file of the current folder, "
                "sqlite:////folder/file.db for an absolute path"
            )
        options = dict(parse_qsl(query, keep_blank_values=True))
        synchronous = options.pop("synchronous", "FULL").upper()
        foreign_keys = options.pop("foreign_keys", "on").lower()
        if synchronous not in {"FULL", "NORMAL", "OFF", "EXTRA"}:
            raise ConfigurationError(f"store {url!r}: synchronous is full, normal, off or extra")
        if foreign_keys not in {"on", "off"}:
            raise ConfigurationError(f"store {url!r}: foreign_keys is on or off")
        if options:
            raise ConfigurationError(f"store {url!r}: unknown options {sorted(options)}")
        return Place(
            path=Path(path).absolute(),
            synchronous=synchronous,
            foreign_keys=foreign_keys == "on",
            busy_s=busy_s,
        )


@cache
def boot_id() -> str:
    """Return what names this boot of the host: a lease of another boot has ended."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return "unknown"


def lease_now() -> int:
    """Return the host's boot-time clock in milliseconds: no setting of the clock changes it."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime_ns(clock) // 1_000_000


def wall_now() -> int:
    """Return milliseconds since 1970 UTC."""
    return time.time_ns() // 1_000_000


def code_of(error: sqlite3.Error) -> int:
    """Return the primary result code, 0 where the driver gives none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _has_old_snapshot(error: sqlite3.Error) -> bool:
    """Tell whether a wait would be for nothing: what was read is old, and stays so."""
    return getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY_SNAPSHOT


def ours(error: sqlite3.Error, what: str) -> ProcessionError | None:
    """Return our error for one that concerns the store and not the statement, or None."""
    code = code_of(error)
    if _has_old_snapshot(error):
        return Contention(
            f"{what}: this connection had read before it took the write lock, and another has "
            "committed since: roll back, run it again, and begin with BEGIN IMMEDIATE; a cursor "
            "that is still being read counts, too"
        )
    if code in _CONTENTION:
        return Contention(f"{what}: another connection was in the way ({error})")
    if code in _UNAVAILABLE:
        return StoreUnavailable(f"{what}: {_UNAVAILABLE[code]} ({error})")
    if code == sqlite3.SQLITE_NOTADB:
        return ConfigurationError(f"{what}: the file is not an SQLite database: check the path")
    return None


def connect(place: Place) -> sqlite3.Connection:
    """Open a connection that begins and commits only when told to. The file is made only where the
    place is not settled yet.

    Raises:
        StoreUnavailable: the file cannot be opened or written, or is not the place's.
        ConfigurationError: it is no database.
    """
    if sqlite3.sqlite_version_info < SQLITE_NEEDED:
        raise ConfigurationError(
            f"this Python brings SQLite {sqlite3.sqlite_version}; Procession needs 3.37 or newer "
            "(STRICT tables)"
        )
    place.check()
    mode = "rwc" if place.file is None else "rw"
    try:
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(place.path))}?mode={mode}",
            uri=True,
            timeout=0,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=CACHED_STATEMENTS,
        )
    except sqlite3.Error as error:
        raise ours(error, f"database {place.path}") or error from error
    try:
        _settle_mode(connection, place)
    except BaseException:
        connection.close()
        raise
    return connection


def _settle_mode(connection: sqlite3.Connection, place: Place) -> None:
    deadline = time.monotonic() + place.busy_s
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone()
            break
        except sqlite3.Error as error:
            # Two processes that make the file at the same moment meet here, or one that reads it
            # while another recovers it after a crash; no busy handler is called for either.
            if code_of(error) not in _CONTENTION or time.monotonic() > deadline:
                raise ours(error, f"database {place.path}") or error from error
            time.sleep(BUSY_POLL_S)
    connection.execute(f"PRAGMA synchronous = {place.synchronous}")
    connection.execute(f"PRAGMA foreign_keys = {'ON' if place.foreign_keys else 'OFF'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")


class Turnstile:
    """The one door to the write lock. Waiting at it is first come, first served.

    It is there for fairness, not for safety: a process that is stopped in it (a debugger, a frozen
    container) keeps the others waiting once, then they go around until it is back.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._file = -1

    def begin(self, connection: sqlite3.Connection) -> None:
        """Open a write transaction on the connection; wait at most the place's `busy_s` for a
        program that does not use the turnstile.

        Raises:
            TransactionMisuse: this thread has one open: it would wait for itself.
            StoreUnavailable: it stayed locked, cannot be written, or is not the place's file.
        """
        self._place.check()
        self._refuse_to_wait_for_ourselves()
        inside = self._enter()
        try:
            self._poll(connection)
        finally:
            if inside:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        _HERE.open = self._place.path, connection

    def _refuse_to_wait_for_ourselves(self) -> None:
        path, connection = getattr(_HERE, "open", (None, None))
        with contextlib.suppress(sqlite3.Error):  # it was closed
            if connection is not None and path == self._place.path and connection.in_transaction:
                raise TransactionMisuse(
                    f"this thread has a write transaction open on {path} and would wait for "
                    "itself: inside of a handler use ctx.send and ctx.execute, not the app's or "
                    "another connection's"
                )

    def _poll(self, connection: sqlite3.Connection) -> None:
        deadline = 0.0
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE /* procession */")
            except sqlite3.Error as error:
                if code_of(error) not in _CONTENTION or _has_old_snapshot(error):
                    raise ours(error, f"database {self._place.path}") or error from error
                now = time.monotonic()
                deadline = deadline or now + self._place.busy_s
                if now >= deadline:
                    raise StoreUnavailable(
                        f"database {self._place.path} stayed locked for "
                        f"{self._place.busy_s:g} s: another program holds a write "
                        "transaction open; end it, nothing is lost meanwhile"
                    ) from error
                time.sleep(BUSY_POLL_S)
            else:
                return

    def _enter(self) -> bool:
        """Wait for our turn; False where we go around."""
        stuck = _GIVEN_UP.get(self._place.path)
        if stuck is not None and stuck.is_alive():
            return False
        if self._file < 0:
            self._file = self._open()
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        queued = _Queued(self._file)
        queued.start()
        if queued.wait(self._place.busy_s * TURNSTILE_WAITS):
            return True
        self._file = -1
        _GIVEN_UP[self._place.path] = queued
        return False

    def _open(self) -> int:
        path = f"{self._place.path}-turnstile"
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StoreUnavailable(
                f"{path} cannot be opened ({error.strerror}): it and its folder must be writable"
            ) from error

    def close(self) -> None:
        """Close the file. Harmless twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Queued(threading.Thread):
    """Stands in the queue, since the system's lock has no time limit; the file is its own once it
    was given up."""

    def __init__(self, file: int) -> None:
        super().__init__(name="procession-turnstile", daemon=True)
        self._file = file
        self._lock = threading.Lock()
        self._turn = threading.Event()
        self._is_given_up = False

    def run(self) -> None:
        """Wait in the system's queue, however long."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX)
        with self._lock:
            if self._is_given_up:
                os.close(self._file)
            else:
                self._turn.set()

    def wait(self, seconds: float) -> bool:
        """Wait for the turn, or give it up and return False."""
        if self._turn.wait(seconds):
            return True
        with self._lock:
            self._is_given_up = not self._turn.is_set()
        return not self._is_given_up


# What this process still has in the queue of a turnstile that somebody stands still in.
_GIVEN_UP: dict[Path, _Queued] = {}

# The write transaction that this thread began last.
_HERE = threading.local()
