"""One connection: how it is opened, and what its errors mean. Only SQLSTATEs decide."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import psycopg
from psycopg import conninfo

from procession.config import Settings
from procession.errors import (
    ConfigurationError,
    Contention,
    ProcessionError,
    StoreUnavailable,
)

SCHEMES = ("postgresql://", "postgres://")
CONNECT_S = 10
# Business rows that somebody else keeps for longer are contention, which costs no attempt. Shorter
# than the server's deadlock_timeout (1 s): a deadlock ends here, too.
LOCK_TIMEOUT_MS = 250
OWN_LOCK_TIMEOUT_MS = 10_000
# A lane's open transaction without a statement is ended by the server at this share of the lease,
# so that a stopped process lets go of its rows before anyone takes over.
IDLE_SHARE = 0.9
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_CONTENTION = {"40001", "40P01", "55P03"}
_UNAVAILABLE_CLASSES = ("08", "53", "58", "XX")
_UNAVAILABLE = {"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "25P04"}
_CONFIGURATION = ("28", "3D", "42")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the database is and how it is reached.

    Attributes:
        conninfo: what libpq is told; holds the password.
        schema: of the tables; "" for the one that the role's search path names first.
        idle_ms: how long a lane's transaction may be without a statement.
    """

    conninfo: str = field(repr=False)
    schema: str = ""
    shown: str = ""
    idle_ms: int = 27_000

    @staticmethod
    def of_url(url: str, settings: Settings) -> Place:
        """Read `postgresql://user:password@host:port/database`, with libpq's own options (such as
        `?sslmode=verify-full`), and `?schema=`.

        Raises:
            ConfigurationError: anything else.
        """
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        schema = options.pop("schema", "")
        if schema and not _SCHEMA.fullmatch(schema):
            raise ConfigurationError(
                f"store {masked(url)}: schema={schema!r} must be up to 63 of a-z, 0-9 and _"
            )
        bare = urlunsplit(("postgresql", parts.netloc, parts.path, "", ""))
        try:
            given = conninfo.conninfo_to_dict(bare)
            # In a step of its own, so that an unknown option is told by name, without the password.
            text = conninfo.make_conninfo("", **{**given, **options})
        except (psycopg.Error, ValueError) as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigurationError(f"store {masked(url)}: {why}") from None
        return Place(
            conninfo=text,
            schema=schema,
            shown=masked(url),
            idle_ms=int(settings.lease_ms * IDLE_SHARE),
        )


def as_query(text: str) -> Any:
    """Return SQL text as the driver's annotations want it: they take literals only. What is put
    into ours is validated, and a handler's own text is its own.
    """
    return text


def masked(url: str) -> str:
    """Return a URL without its password, wherever it stands in it."""
    parts = urlsplit(url)
    netloc = re.sub(r":[^@]*@", ":***@", parts.netloc)
    query = re.sub(r"(?i)((?:ssl)?password)=[^&]*", r"\1=***", parts.query)
    return urlunsplit((parts.scheme, netloc, parts.path, query, ""))


class Connection(psycopg.Connection[Any]):
    """The driver's connection.

    Attributes:
        pooled: a pooler stands between: nothing of a session outlives a transaction there.
    """

    pooled = False


def connect(place: Place, *, lane: bool = False, what: str = "connecting") -> Connection:
    """Open a connection in autocommit; its transactions are begun in words.

    Args:
        lane: it runs handlers: it waits for business rows a short time only, and the server ends
            its transaction when it stays without a statement.

    Raises:
        StoreUnavailable: the server cannot be reached.
        ConfigurationError: it refuses this role or database.
    """
    try:
        connection = Connection.connect(
            place.conninfo,
            autocommit=True,
            connect_timeout=CONNECT_S,
            application_name="procession",
        )
        pid = connection.execute("SELECT pg_backend_pid()").fetchone()
        # A pooler makes up a number of its own for the key to cancel with.
        connection.pooled = pid is None or pid[0] != connection.pgconn.backend_pid
        if connection.pooled:
            connection.prepare_threshold = None
        else:
            connection.execute(as_query(session_settings(place, lane=lane)))
    except psycopg.Error as error:
        code = error.sqlstate or ""
        if code.startswith(_CONFIGURATION):
            raise ConfigurationError(f"database {place.shown}: {_line(error)}") from None
        raise StoreUnavailable(
            f"{what}: the server of {place.shown} cannot be used: {_line(error)}"
        ) from None
    return connection


def session_settings(place: Place, *, lane: bool) -> str:
    """Return the statement that a connection of our own begins with."""
    timeout_ms = LOCK_TIMEOUT_MS if lane else OWN_LOCK_TIMEOUT_MS
    return (
        "SELECT set_config('default_transaction_isolation', 'read committed', false), "
        f"set_config('lock_timeout', '{timeout_ms}', false), "
        f"set_config('idle_in_transaction_session_timeout', '{place.idle_ms}', false)"
    )


def local_settings(place: Place, *, lane: bool) -> str:
    """Return the statement that a pooled connection begins each transaction with."""
    timeout_ms = LOCK_TIMEOUT_MS if lane else OWN_LOCK_TIMEOUT_MS
    return (
        f"SELECT set_config('lock_timeout', '{timeout_ms}', true), "
        f"set_config('idle_in_transaction_session_timeout', '{place.idle_ms}', true)"
    )


def ours(error: BaseException, what: str) -> ProcessionError | None:
    """Return what a driver's error means for a batch or a step of upkeep; None where it is the
    fault of the statement alone.
    """
    if not isinstance(error, psycopg.Error):
        return None
    code = error.sqlstate or ""
    if code in _CONTENTION:
        return Contention(f"{what}: another transaction was in the way: {_line(error)}")
    if code in _UNAVAILABLE or code.startswith(_UNAVAILABLE_CLASSES):
        return StoreUnavailable(f"{what}: {_line(error)}")
    if not code and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return StoreUnavailable(f"{what}: {_line(error)}")
    return None


def _line(error: psycopg.Error) -> str:
    """Return the error's first line: the rest may show values, and an address its password."""
    text = str(error).strip().splitlines()
    return re.sub(r"password=\S+", "password=***", text[0] if text else type(error).__name__)
