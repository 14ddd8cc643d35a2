"""The servers that tests run against. A test whose server is down fails; none is skipped.

`scripts/services up` starts them and writes their URLs to `.services/env`. A variable of the same
name (PROCESSION_TEST_POSTGRES and its like) names another server instead.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import psycopg
import pymysql

ROOT = Path(__file__).parents[1]
TO_DO = "run scripts/services up"
CONNECT_SECONDS_MAX = 10


def url(service: str, role: str = "") -> str:
    """The URL of a running server's database `procession`: url("postgres"), url("mariadb", "app").

    The roles: "" may create tables and databases, "app" may not, "admin" may do everything (and is
    connected to the server's own database).
    """
    name = f"PROCESSION_TEST_{service}_{role}".upper().rstrip("_")
    file = ROOT / ".services" / "env"
    found = os.environ.get(name) or parsed(file.read_text() if file.exists() else "").get(name)
    if found is None:
        raise RuntimeError(f"{name} is in neither the environment nor .services/env: {TO_DO}")
    check_running(service, found)
    return found


def parsed(env: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in env.splitlines())


@functools.cache  # once a process: a test that stops a server has one apart
def check_running(service: str, url: str) -> None:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port), CONNECT_SECONDS_MAX).close()
    except OSError as error:
        raise RuntimeError(
            f"{service} does not answer on {parts.hostname}:{parts.port} ({error}): {TO_DO}"
        ) from error


@dataclass(frozen=True)
class Database:
    """A database of one test: the URLs of its owner, of the role without DDL, of the superuser."""

    name: str
    url: str
    app_url: str
    admin_url: str


@contextmanager
def database(service: str) -> Iterator[Database]:
    """Create an empty database and drop it afterwards, with whatever is still connected to it.

    On "postgres" and "pgbouncer" (the same server, reached through the pooler) it belongs to
    `procession`, and `procession_app` has the rights that the test grants it; on "mariadb" that one
    may read and change rows of every table.
    """
    server = {"pgbouncer": "postgres"}.get(service, service)
    admin = url(server, "admin")
    sweep(admin)
    name = f"procession_t{os.getpid()}_{secrets.token_hex(4)}"
    owned = " OWNER procession" if server == "postgres" else ""
    execute(admin, f"CREATE DATABASE {name}{owned}")
    urls = (urlsplit(url(service, role)) for role in ("", "app", "admin"))
    try:
        yield Database(name, *(parts._replace(path=f"/{name}").geturl() for parts in urls))
    finally:
        drop(admin, name)


@functools.cache  # once a process
def sweep(admin: str) -> None:
    """Drop what test processes left that were killed: each database has its process in its name."""
    if is_postgres(admin):
        names = execute(admin, "SELECT datname FROM pg_database")
    else:
        names = execute(admin, "SELECT schema_name FROM information_schema.schemata")
    for (name,) in names:
        if (left := re.fullmatch(r"procession_t(\d+)_\w+", name)) and not alive(int(left[1])):
            drop(admin, name)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def drop(admin: str, name: str) -> None:
    if is_postgres(admin):
        execute(admin, f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")
        return
    # MariaDB has no FORCE, and would wait for as long as a transaction holds one of the tables.
    connected = f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"
    for (connection,) in execute(admin, connected):
        try:
            execute(admin, f"KILL {connection}")
        except pymysql.err.OperationalError as error:
            if error.args[0] != pymysql.constants.ER.NO_SUCH_THREAD:  # it has left by itself
                raise
    execute(admin, f"DROP DATABASE IF EXISTS {name}")


def is_postgres(url: str) -> bool:
    return urlsplit(url).scheme.startswith("postgres")


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own."""
    if is_postgres(url):
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
    parts: SplitResult = urlsplit(url)
    with (
        pymysql.connect(
            host=parts.hostname,
            port=parts.port,
            user=parts.username,
            password=parts.password,
            database=parts.path[1:],
            autocommit=True,
        ) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(statement)
        return list(cursor.fetchall())


@contextmanager
def postgres_schema() -> Iterator[str]:
    """Create an empty schema in the database `procession` and drop it afterwards: quicker to make
    than a database. The URL that leads to it ends in libpq's options, so that a test can add some.
    """
    own = url("postgres")
    name = f"procession_t{os.getpid()}_{secrets.token_hex(4)}"
    execute(own, f"CREATE SCHEMA {name}")
    try:
        yield f"{own}?options=-csearch_path%3D{name}"
    finally:
        execute(own, f"DROP SCHEMA IF EXISTS {name} CASCADE")


class Apart:
    """Servers of one test, which may stop and crash them while other tests run against theirs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def url(self, service: str, role: str = "") -> str:
        """As the function of this name; it does not look whether the server runs."""
        name = f"PROCESSION_TEST_{service}_{role}".upper().rstrip("_")
        return parsed(self("env"))[name]

    def __call__(self, *arguments: str) -> str:
        """Run scripts/services, for example ("crash", "postgres"), and return what it says."""
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "services"), "--apart", self._name, *arguments],
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@contextmanager
def apart(*services: str) -> Iterator[Apart]:
    """Start servers of the test's own (some 2 s), and remove them with their data afterwards."""
    servers = Apart(f"t{os.getpid()}-{secrets.token_hex(3)}")
    try:
        servers("up", *services)
        yield servers
    finally:
        servers("clean")
