"""Statements in libpq's pipeline: sent one after the other, read together.

A cursor costs some 40 µs a statement, this some 5. Every statement carries a tag, and an error says
whose statement it was: in a pipeline it surfaces long after that statement's turn.
"""

from __future__ import annotations

import itertools
import select
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import psycopg
from psycopg import errors, pq
from psycopg.adapt import PyFormat
from psycopg.adapt import Transformer as _Transformer

TEXT, BINARY = 0, 1
# Prepared statements kept on the server for one connection; then all are given up.
PREPARED_MAX = 500
# Statements sent before the socket is flushed, so that the server works meanwhile.
FLUSH_EVERY = 16
_OK = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY)
_OK_NUMBERS = frozenset(int(status) for status in _OK)
_SYNC = int(pq.ExecStatus.PIPELINE_SYNC)
_ABORTED = int(pq.ExecStatus.PIPELINE_ABORTED)
_INT4 = 2**31
_INT8 = 2**63
_OID_INT4, _OID_INT8, _OID_NUMERIC, _OID_BOOL, _OID_FLOAT8, _OID_BYTEA = 23, 20, 1700, 16, 701, 17


class StatementFailed(Exception):
    """A statement of the pipeline failed.

    Attributes:
        tag: whose it was.
        error: the driver's own error.
    """

    def __init__(self, tag: int, error: psycopg.Error) -> None:
        super().__init__(tag, error)
        self.tag = tag
        self.error = error


class Result:
    """What a statement returned. Rows are read when they are asked for."""

    __slots__ = ("_pgresult", "_transformer", "command", "count")

    def __init__(self, pgresult: pq.abc.PGresult, transformer: Any) -> None:
        self._pgresult = pgresult
        self._transformer = transformer
        self.command = pgresult.command_status or b""
        self.count = pgresult.command_tuples

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the rows as tuples of Python values."""
        number = self._pgresult.ntuples
        if not number:
            return []
        self._transformer.set_pgresult(self._pgresult)
        rows: list[tuple[Any, ...]] = self._transformer.load_rows(0, number, tuple)
        return rows

    @property
    def columns(self) -> list[str]:
        """The columns' names."""
        return [
            (self._pgresult.fname(index) or b"").decode() for index in range(self._pgresult.nfields)
        ]


class Wire:
    """One connection's pipeline.

    Args:
        connection: idle, in autocommit; nobody else uses it while the pipeline is on.
        named: whether statements may be prepared by name: not behind a pooler.

    Attributes:
        is_on: the connection is in pipeline mode.
    """

    def __init__(self, connection: psycopg.Connection[Any], *, named: bool) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._named = named
        self._names: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        # Never used twice on a connection: a name may be left on the server.
        self._numbers = itertools.count()
        self._waiting: deque[tuple[int, bool]] = deque()
        self._unflushed = 0
        self._transformer = _Transformer(connection)
        self._poll = select.poll()
        self._poll.register(self._pg.socket, select.POLLIN)
        self._poll_both = select.poll()
        self._poll_both.register(self._pg.socket, select.POLLIN | select.POLLOUT)
        self._pg.nonblocking = 1
        self.is_on = False

    def on(self) -> None:
        """Enter pipeline mode."""
        if not self.is_on:
            self._pg.enter_pipeline_mode()
            self.is_on = True

    def off(self) -> None:
        """Leave pipeline mode, with nothing pending: the driver's own methods work then."""
        if self.is_on:
            self._pg.exit_pipeline_mode()
            self.is_on = False

    @property
    def status(self) -> pq.TransactionStatus:
        """The transaction's state as of the last drain."""
        return pq.TransactionStatus(self._pg.transaction_status)

    def forget_prepared(self) -> None:
        """Give up what is prepared, if it has become too much. Between transactions only."""
        if len(self._names) > PREPARED_MAX:
            self._names.clear()
            self.send(b"DEALLOCATE ALL", (), tag=-1)

    def send(  # noqa: PLR0913  the protocol's own
        self,
        text: bytes,
        values: Sequence[bytes | None],
        types: tuple[int, ...] = (),
        formats: Sequence[int] | None = None,
        *,
        tag: int,
        keep: bool = False,
        result_format: int = BINARY,
    ) -> None:
        """Send a statement; `keep` has its result returned by the next `drain`."""
        pg = self._pg
        if self._named:
            name = self._names.get((text, types))
            if name is None:
                name = self._names[text, types] = b"p%d" % next(self._numbers)
                pg.send_prepare(name, text, types)
                self._waiting.append((tag, False))
            pg.send_query_prepared(name, values, formats, result_format)
        else:
            pg.send_query_params(text, values, types or None, formats, result_format)
        self._waiting.append((tag, keep))
        self._unflushed += 1
        if self._unflushed >= FLUSH_EVERY:
            self._unflushed = 0
            pg.flush()

    @property
    def pending(self) -> bool:
        """Whether something was sent whose result was not read."""
        return bool(self._waiting)

    def drain(self) -> list[Result]:
        """Wait for everything that was sent; return the results that were to be kept.

        Raises:
            StatementFailed: the first statement that failed; what came after it did not run.
            psycopg.OperationalError: the connection is lost.
        """
        pg = self._pg
        pg.pipeline_sync()
        self._unflushed = 0
        kept: list[Result] = []
        failed: StatementFailed | None = None
        waiting = self._waiting
        self._flush()
        is_busy, get_result = pg.is_busy, pg.get_result
        while waiting:
            tag, keep = waiting.popleft()
            result = self._next() if is_busy() else get_result()
            if result is None:
                raise self._lost()
            status = result.status
            if status in _OK_NUMBERS:
                if keep:
                    kept.append(Result(result, self._transformer))
            elif status != _ABORTED and failed is None:
                failed = StatementFailed(tag, error_of(result))
            # Each statement's results end with a None.
            while (self._next() if is_busy() else get_result()) is not None:
                pass
        end = self._next()
        if end is None or end.status != _SYNC:
            raise self._lost()
        if failed is not None:
            # A statement whose preparation failed, or was skipped, is not there.
            self._names.clear()
            raise failed
        return kept

    def wait(self, seconds: float) -> bool:
        """Wait until the server says something unasked, at most this long; return whether it did.

        Raises:
            psycopg.OperationalError: the connection is lost.
        """
        if not self._poll.poll(seconds * 1000):
            return False
        self._pg.consume_input()
        while self._pg.notifies() is not None:
            pass
        return True

    def _flush(self) -> None:
        pg = self._pg
        while pg.flush():
            for _, event in self._poll_both.poll():
                if event & ~select.POLLOUT:
                    pg.consume_input()

    def _next(self) -> pq.abc.PGresult | None:
        pg = self._pg
        while pg.is_busy():
            self._poll.poll()
            pg.consume_input()
        return pg.get_result()

    def _lost(self) -> psycopg.OperationalError:
        text = self._pg.get_error_message()
        return psycopg.OperationalError(text or "the connection was lost")


def error_of(result: pq.abc.PGresult) -> psycopg.Error:
    """Return a failed result as the driver's own error: a class of its SQLSTATE."""
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    primary = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(
        "utf-8", "replace"
    )
    detail = (result.error_field(pq.DiagnosticField.MESSAGE_DETAIL) or b"").decode(
        "utf-8", "replace"
    )
    text = f"{primary or result.get_error_message()}{f' ({detail})' if detail else ''}"
    try:
        return errors.lookup(code)(text)
    except KeyError:
        error = psycopg.DatabaseError(text)
        error.sqlstate = code or None
        return error


class Binder:
    """Turns Python values into what the wire takes.

    Text and NULL go without a type, so that the server takes the one of their place; numbers go as
    the smallest usual type that holds them, as in the driver.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._transformer = _Transformer(connection)

    def bind(self, values: Iterable[Any]) -> tuple[list[bytes | None], tuple[int, ...], list[int]]:
        """Return values, type numbers and formats."""
        bound: list[bytes | None] = []
        types: list[int] = []
        formats: list[int] = []
        for value in values:
            kind = type(value)
            if kind is int and -_INT4 <= value < _INT4:
                bound.append(b"%d" % value)
                types.append(_OID_INT4)
                formats.append(TEXT)
            elif kind is str:
                bound.append(value.encode())
                types.append(0)
                formats.append(TEXT)
            elif kind is int:
                bound.append(b"%d" % value)
                types.append(_OID_INT8 if -_INT8 <= value < _INT8 else _OID_NUMERIC)
                formats.append(TEXT)
            elif value is None:
                bound.append(None)
                types.append(0)
                formats.append(TEXT)
            elif kind is bool:
                bound.append(b"t" if value else b"f")
                types.append(_OID_BOOL)
                formats.append(TEXT)
            elif kind is bytes:
                bound.append(value)
                types.append(_OID_BYTEA)
                formats.append(BINARY)
            elif kind is float:
                bound.append(repr(value).encode())
                types.append(_OID_FLOAT8)
                formats.append(TEXT)
            else:
                dumper = self._transformer.get_dumper(value, PyFormat.AUTO)
                dumped = dumper.dump(value)
                bound.append(None if dumped is None else bytes(dumped))
                types.append(dumper.oid)
                formats.append(dumper.format)
        return bound, tuple(types), formats


# Arrays in the binary format: dimensions, whether there are NULLs, element type, length, first.
_HEAD = struct.Struct("!iiiii")
_LENGTH = struct.Struct("!i")
_NULL = _LENGTH.pack(-1)
_EMPTY = struct.Struct("!iii")
_INT8_VALUE = struct.Struct("!q")


def _array(oid: int, elements: Sequence[bytes | None]) -> bytes:
    if not elements:
        return _EMPTY.pack(0, 0, oid)
    pack = _LENGTH.pack
    parts = [_HEAD.pack(1, 1, oid, len(elements), 1)]
    parts += [
        part
        for element in elements
        for part in ((_NULL,) if element is None else (pack(len(element)), element))
    ]
    return b"".join(parts)


def bytes_array(values: Sequence[bytes | None]) -> bytes:
    """Return a `bytea[]`."""
    return _array(17, values)


def text_array(values: Sequence[str | None]) -> bytes:
    """Return a `text[]`."""
    return _array(25, [None if value is None else value.encode() for value in values])


def place_array(values: Sequence[bytes]) -> bytes:
    """Return a `tid[]` of values as they came in the binary format."""
    return _array(27, values)


def int_array(values: Sequence[int | None]) -> bytes:
    """Return a `bigint[]`."""
    if None in values:
        pack = _INT8_VALUE.pack
        return _array(20, [None if value is None else pack(value) for value in values])
    number = len(values)
    if not number:
        return _EMPTY.pack(0, 0, 20)
    # All at once: each element is its length, 8, and its value.
    pairs = [8] * (2 * number)
    pairs[1::2] = cast("Sequence[int]", values)
    return _HEAD.pack(1, 1, 20, number, 1) + struct.pack("!" + "iq" * number, *pairs)


def bool_array(values: Sequence[bool | None]) -> bytes:
    """Return a `boolean[]`."""
    return _array(
        16, [None if value is None else b"\x01" if value else b"\x00" for value in values]
    )
