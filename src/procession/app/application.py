"""The app: what is declared once, and what programs call."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

from procession.abc import (
    ConsumerStatus,
    DeadLetterFilter,
    DeadLetterRecord,
    DeadLetters,
    InboxRow,
    MarkingPublisher,
    Store,
    Topology,
)
from procession.app.consumers import ConsumerDefinition, Validator
from procession.app.handlers import Handler
from procession.app.middleware import Middleware
from procession.app.middleware.chain import check_middleware
from procession.app.queues import Queue, Queues, SendHook, check_name
from procession.app.resources import Factory, Resources
from procession.codecs.json import JsonCodec
from procession.config import RetryPolicy, Settings
from procession.core.keys import KeySpec
from procession.errors import ConfigurationError
from procession.flows import dead_letters as operators
from procession.message import Outgoing
from procession.runtime.drive import drive
from procession.runtime.health import served
from procession.runtime.worker import Worker
from procession.stores.memory import MemoryStore
from procession.stores.sqlite import SqliteStore
from procession.telemetry import Event, Instrument, Instruments, LogInstrument

SEND_CHUNK = 1_000
LOGGER = logging.getLogger("procession")
STORE_VARIABLE = "PROCESSION_STORE"
AlertHook = Callable[[Mapping[str, Any]], object]


class App:
    """Queues, consumers and the store they share.

    Args:
        name: for logs and status.
        store: where everything is kept: `sqlite:///orders.db`, or `memory://` for tests. By
            default what the environment variable `PROCESSION_STORE` says.
        settings: limits and durations; by default what `PROCESSION_…` variables say.
        retry: the retry policy of consumers that name none.
        migrate: `auto` brings the schema up to date at start, `check` refuses to start instead.
        table_prefix: of the tables' names.
        instruments: receive every event, beside the log.

    Attributes:
        instruments: those; more may be added until the app runs.

    Raises:
        ConfigurationError: an argument is wrong.

    Example:
        >>> app = App("shop", store="sqlite:///shop.db")
        >>> @app.consumer("orders", name="orders", session="id")
        ... def order(payload: dict, ctx) -> None: ...
    """

    def __init__(  # noqa: PLR0913  keyword-only, all with defaults
        self,
        name: str,
        *,
        store: str | None = None,
        settings: Settings | None = None,
        retry: RetryPolicy | None = None,
        migrate: Literal["auto", "check"] = "auto",
        table_prefix: str = "procession_",
        instruments: Iterable[Instrument] = (),
    ) -> None:
        self.name = check_name(name, "app")
        if migrate not in ("auto", "check"):
            raise ConfigurationError(f"migrate={migrate!r}: it is 'auto' or 'check'")
        self.settings = settings or Settings.from_environment()
        store = store or os.environ.get(STORE_VARIABLE)
        if not store:
            raise ConfigurationError(
                f"app {name!r} has no store: pass store='sqlite:///file.db', or set the "
                f"environment variable {STORE_VARIABLE}"
            )
        self.store_url = store
        self._table_prefix = table_prefix
        self._migrate: Literal["auto", "check"] = migrate
        self._retry = retry or RetryPolicy()
        self.instruments = list(instruments)
        self._alert_hooks: list[AlertHook] = []
        self._middlewares: list[Middleware] = []
        self._resources = Resources()
        self._queues = Queues(self.settings)
        self._consumers: dict[str, ConsumerDefinition] = {}
        self._store = self._make_store(store)
        self._publisher: MarkingPublisher | None = None
        self._is_open = False
        self._running: Worker | None = None
        self._lock = threading.RLock()

    # Declarations.

    def queue(
        self,
        name: str,
        *,
        session: KeySpec | None = None,
        key: KeySpec | None = None,
        duplicate_window: timedelta | None = None,
    ) -> Queue:
        """Declare a queue: each of its messages goes to its one consumer.

        Args:
            name: names it in sends and tables.
            session: field path, several, or a function of the payload: messages of one session
                run in order, one at a time.
            key: the dedup key likewise; by default the message id.
            duplicate_window: an id sent again within it is not stored again.

        Raises:
            ConfigurationError: it contradicts an earlier declaration, or the key names what a
                broker assigns.
        """
        queue = self._queues.declare(name, "queue", duplicate_window=duplicate_window)
        queue.rule(f"queue {name!r}", session=session, key=key)
        return queue

    def topic(
        self,
        name: str,
        *,
        session: KeySpec | None = None,
        key: KeySpec | None = None,
        duplicate_window: timedelta | None = None,
    ) -> Queue:
        """Declare a topic: each of its consumers gets its own copy of each message. Otherwise as
        `queue`.
        """
        topic = self._queues.declare(name, "topic", duplicate_window=duplicate_window)
        topic.rule(f"topic {name!r}", session=session, key=key)
        return topic

    def message(self, name: str) -> Callable[[type], type]:
        """Name the message type of a payload class; by default it is the class's own name.

        Example:
            >>> app = App("doc", store="memory://")
            >>> @app.message("order.deleted")
            ... class OrderDeleted: ...
        """

        def register(type_: type) -> type:
            self._queues.name_type(type_, name)
            return type_

        return register

    def consumer(  # noqa: PLR0913  keyword-only, all with defaults
        self,
        queue: str,
        *,
        name: str | None = None,
        session: KeySpec | None = None,
        key: KeySpec | None = None,
        fingerprint: Iterable[str] | None = None,
        validators: Iterable[Validator] = (),
        validate_session: Callable[[Any], object] | None = None,
        retry: RetryPolicy | None = None,
        concurrency: int = 1,
        on_conflict: Literal["dead-letter", "alert"] = "dead-letter",
        on_poison: Literal["continue", "park", "block"] = "continue",
        commit: Literal["batch", "each"] = "batch",
    ) -> Callable[[Handler], ConsumerDefinition]:
        """Register a handler as the consumer of a queue, or as a subscriber of a topic.

        The handler takes the payload (its annotation says the type: a msgspec Struct, a dataclass,
        `dict`, or `bytes` for the body as it is) and, if it wants, the `Context`. It may run
        several times before its one commit. Returning is success; see `Reject` and `Retry`.

        Args:
            queue: a declared queue or topic; an unknown name declares a queue.
            name: the consumer's name. It is part of every dedup key: keep it for ever.
            session, key: shorthand for the same rules of the queue.
            fingerprint: field paths that tell a resend from a conflict; by default the payload.
            validators: called with the payload; one that raises or returns False dead-letters.
            validate_session: returns the session key that the payload belongs to; another one
                dead-letters.
            retry: when failed messages run again.
            concurrency: lanes in a process; a store with one writer uses one.
            on_conflict: what becomes of a message whose key took effect with another payload.
            on_poison: what becomes of the session of a message that keeps failing.
            commit: `each` takes one message a transaction.

        Raises:
            ConfigurationError: any of it is wrong; all faults are named.
        """
        if name is None:
            raise ConfigurationError(
                f"a consumer of {queue!r} has no name: pass name=…; it becomes part of the dedup "
                "keys, so it is never derived from a function's name"
            )
        if name in self._consumers:
            raise ConfigurationError(
                f"consumer {name!r} is registered already (on {self._consumers[name].queue.name!r}"
                "): a name is one subscription; add message types with @consumer.on"
            )
        declared = next((known for known in self._queues if known.name == queue), None)
        if declared is None:
            declared = self._queues.declare(queue, "queue")
        if declared.kind == "queue":
            other = next((c.name for c in self._consumers.values() if c.queue is declared), None)
            if other is not None:
                raise ConfigurationError(
                    f"queue {queue!r} has the consumer {other!r} already, and now {name!r}: "
                    "several consumers that each get their own copy need app.topic"
                )
        declared.rule(f"consumer {name!r}", session=session, key=key)
        definition = ConsumerDefinition(
            declared,
            self._queues,
            name=name,
            fingerprint=None if fingerprint is None else tuple(fingerprint),
            validators=tuple(validators),
            validate_session=validate_session,
            retry=retry or self._retry,
            concurrency=concurrency,
            on_conflict=on_conflict,
            on_poison=on_poison,
            commit=commit,
        )

        def register(function: Handler) -> ConsumerDefinition:
            definition.add(function)
            self._consumers[name] = definition
            return definition

        return register

    def middleware(self, function: Middleware) -> Middleware:
        """Put code around every handler; the first registered is the outermost.

        Raises:
            ConfigurationError: it is no generator function.

        Example:
            >>> app = App("doc", store="memory://")
            >>> @app.middleware
            ... def announce(payload, ctx):
            ...     print("before")
            ...     yield
            ...     print("after")
        """
        self._middlewares.append(check_middleware(function))
        return function

    def resource(self, factory: Factory) -> Factory:
        """Share what a function makes with all handlers, for the life of a worker.

        A handler gets it by annotating a parameter with its class. A generator function cleans up
        behind its `yield`, in a `finally` if it must happen after a failure, too.

        Raises:
            ConfigurationError: its return annotation names no class, or one that is taken.

        Example:
            >>> app = App("doc", store="memory://")
            >>> class Rates(dict): ...
            >>> @app.resource
            ... def rates() -> Rates:
            ...     return Rates(EUR=1.17)
            >>> @app.consumer("orders", name="orders")
            ... def order(payload: dict, rates: Rates) -> None: ...
        """
        self._resources.add(factory)
        return factory

    def lifespan(self, hook: Callable[[], Generator[None]]) -> Callable[[], Generator[None]]:
        """Run code when a worker starts (before the `yield`) and when it has stopped (behind it).

        Raises:
            ConfigurationError: it is no generator function.
        """
        self._resources.add_hook(hook)
        return hook

    @contextmanager
    def ready_handlers(self) -> Generator[None]:
        """Open the resources and put the middlewares in place for the block."""
        self._resources.open()
        try:
            for consumer in self._consumers.values():
                consumer.bind(self._middlewares, self._resources)
            yield
        finally:
            self._resources.close()

    def on_alert(self, hook: AlertHook) -> AlertHook:
        """Call a function with the fields of each alert, after the commit that caused it. What it
        raises is logged and dropped.
        """
        self._alert_hooks.append(hook)
        return hook

    def on_send(self, hook: SendHook) -> SendHook:
        """Give headers to every message that this app and its handlers send: the hook is called at
        each send and returns some, or none. Headers that the send names itself win.

        A message with headers takes longer to store than one without. What the hook raises, the
        send raises.

        Example:
            >>> app = App("doc", store="memory://")
            >>> @app.on_send
            ... def origin() -> dict[str, str]:
            ...     return {"origin": "shop"}
        """
        self._queues.send_hooks.append(hook)
        return hook

    # Sending.

    def send(  # noqa: PLR0913  keyword-only, all with defaults
        self,
        queue: str,
        payload: Any,
        *,
        message_id: str | None = None,
        session: str | None = None,
        after: timedelta | None = None,
        due: datetime | None = None,
        expires: timedelta | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """Send one message from outside of a handler; return its message id.

        On return it is durable. After an error it is unknown whether it was stored: send it again
        with the same `message_id`. Parameters and errors are those of `Context.send`.

        Raises:
            StoreUnavailable: the store cannot be written now.
        """
        outgoing = self._queues.outgoing(
            queue,
            payload,
            message_id=message_id,
            session=session,
            after=after,
            due=due,
            expires=expires,
            headers=headers,
        )
        with self._lock:
            drive(self.publisher().publish([outgoing]))
        return outgoing.message_id.decode()

    def send_many(
        self, queue: str, items: Iterable[Any], *, identify: Callable[[Any], str] | None = None
    ) -> int:
        """Send many messages, 1,000 a transaction; return how many were sent.

        Args:
            queue: name of a queue or topic.
            items: payloads, in order.
            identify: returns a payload's message id; by default a UUIDv7 each. Give it where the
                call may have to be repeated after an error: what was stored keeps its id.

        Raises:
            ConfigurationError, MessageError, StoreUnavailable: as `send`; chunks before the one
                that failed are stored.
        """
        make = self._queues.outgoing
        messages = (
            make(queue, item, message_id=None if identify is None else identify(item))
            for item in items
        )
        return self.publish(messages)

    def publish(self, messages: Iterable[Outgoing]) -> int:
        """Send messages that `outgoing` made, 1,000 a transaction; return how many."""
        sent = 0
        iterator = iter(messages)
        while chunk := list(islice(iterator, SEND_CHUNK)):
            with self._lock:
                drive(self.publisher().publish(chunk))
            sent += len(chunk)
        return sent

    @property
    def outgoing(self) -> Callable[..., Outgoing]:
        """Makes a message without sending it; parameters as `send`."""
        return self._queues.outgoing

    # Running.

    @property
    def consumers(self) -> Mapping[str, ConsumerDefinition]:
        """The registered consumers by name."""
        return dict(self._consumers)

    @property
    def store(self) -> Store:
        """The store; open after `open`."""
        return self._store

    @property
    def instrument(self) -> Instrument:
        """All instruments as one."""
        return Instruments(LogInstrument(), *self.instruments, _AlertHooks(self._alert_hooks))

    def open(self) -> None:
        """Open the store, bring its schema up to date and declare queues and consumers. Harmless
        twice; `send` and `run` do it themselves.

        Raises:
            ConfigurationError: the store does not fit the code.
            StoreUnavailable: it cannot be reached.
        """
        with self._lock:
            if self._is_open:
                return
            drive(self._store.open(migrate=self._migrate))
            try:
                drive(self._store.declare(self.topology))
            except BaseException:
                drive(self._store.close())
                raise
            self._is_open = True

    @property
    def topology(self) -> Topology:
        """What the store is told at start."""
        return Topology(
            queues=tuple(queue.declaration for queue in self._queues),
            consumers=tuple((c.queue.name, c.name) for c in self._consumers.values()),
        )

    def close(self) -> None:
        """Close the store. Harmless twice."""
        with self._lock:
            if self._publisher is not None:
                drive(self._publisher.close())
                self._publisher = None
            if self._is_open:
                drive(self._store.close())
                self._is_open = False

    def worker(self, *, worker_id: str | None = None) -> Worker:
        """Return a worker of this process for all consumers; `Worker.run` works until stopped."""
        if not self._consumers:
            raise ConfigurationError(f"app {self.name!r} has no consumer: register one to run it")
        self.open()
        return Worker(
            self._store,
            tuple(self._consumers.values()),
            settings=self.settings,
            instrument=self.instrument,
            worker_id=worker_id,
            lifespan=self.ready_handlers,
        )

    def run(self, *, health_port: int | None = None, health_host: str | None = None) -> None:
        """Work in this process until SIGTERM or SIGINT, then stop in good order.

        Args:
            health_port: serve `/live` and `/ready` there; by default at the port that the
                environment variable `PROCESSION_HEALTH_PORT` names, or not at all.
            health_host: the address to listen at; by default `PROCESSION_HEALTH_HOST`, or this
                host alone.

        Raises:
            ConfigurationError: there is no consumer, or the port is none or is taken.
        """
        worker = self.worker()
        with served(worker, port=health_port, host=health_host):
            worker.run()

    def __enter__(self) -> Self:
        """Work on threads of this process while the block runs, beside the program's own code."""
        self._running = self.worker()
        self._running.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop in good order: finish the running batches, commit, release."""
        worker, self._running = self._running, None
        if worker is not None:
            worker.stop()
            worker.join()
        self.close()

    async def __aenter__(self) -> Self:
        """As `with app:`, for an asyncio program: its loop is not blocked by start and stop."""
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *exception: object) -> None:
        """As the end of `with app:`."""
        await asyncio.to_thread(self.__exit__, *exception)

    def health(self) -> Mapping[str, Any]:
        """Return the health of the worker that `with app:` runs; see `Worker.health`."""
        if self._running is None:
            return {"live": False, "ready": False, "why": ["no worker runs here"], "lanes": []}
        return self._running.health()

    # Looking.

    def status(self) -> list[ConsumerStatus]:
        """Return the numbers of every consumer in the store, also of those this code lacks."""
        self.open()
        with self._lock:
            return drive(self._store.status())

    def recorded(self, consumer: str, key: str) -> InboxRow | None:
        """Return what the inbox says of a key, or None."""
        self.open()
        with self._lock:
            return drive(self._store.inbox(consumer, key.encode()))

    # Dead letters: what operators decide. See `procession.flows.dead_letters`.

    def dead_letters(self, wanted: DeadLetterFilter | None = None) -> list[DeadLetterRecord]:
        """Return dead letters, by default all that wait for a decision."""
        with self._dead_letters() as letters:
            return drive(letters.find(wanted or DeadLetterFilter()))

    def dead_letter(self, number: int) -> DeadLetterRecord:
        """Return one dead letter, whatever became of it.

        Raises:
            OperatorError: there is none of that number.
        """
        with self._dead_letters() as letters:
            return drive(operators.show(letters, number))

    def edit_dead_letter(self, number: int, body: Any, *, by: str) -> None:
        """Replace a dead letter's body; its replay then runs the new one.

        It keeps its key and its session, and a resend of the mended message is a duplicate.

        Args:
            number: of the dead letter.
            body: JSON as text or bytes (for a consumer of `bytes`, the body itself), or a payload
                of any other type, which is encoded as `send` would.
            by: who edits.

        Raises:
            OperatorError: there is no such dead letter, it is decided already, or the body is of
                another key or session.
            MessageError: its consumer would refuse the body.
        """
        with self._dead_letters() as letters:
            record = drive(operators.show(letters, number))
            drive(
                operators.edit(
                    letters,
                    number,
                    body.encode() if isinstance(body, str) else JsonCodec().encode(body),
                    by=by,
                    rules=self._rules.get(record.consumer),
                    bytes_max=self.settings.payload_max,
                )
            )

    def replay_dead_letters(
        self, numbers: Iterable[int], *, by: str, as_new: str | None = None
    ) -> list[operators.Replay]:
        """Queue dead letters again, each in its session and in the order they had there; return
        what became of each. Harmless twice.

        Args:
            numbers: of the dead letters.
            by: who replays.
            as_new: the key under which a conflict runs; for one number only.

        Raises:
            OperatorError, MessageError: nobody is named, or `as_new` is no key or is given for
                several.
            StoreUnavailable: what was queued before stays queued.
        """
        with self._lock, self._dead_letters() as letters:
            return drive(
                operators.replay(
                    letters,
                    numbers,
                    by=by,
                    as_new=as_new,
                    rules=self._rules,
                    lookup=self._store.inbox,
                )
            )

    def discard_dead_letter(self, number: int, *, by: str, why: str) -> None:
        """End a dead letter for good; it stays readable, with who and why.

        Raises:
            OperatorError: there is none, it is decided already, or nobody or no reason is named.
        """
        with self._dead_letters() as letters:
            drive(operators.discard(letters, number, by=by, why=why))

    @contextmanager
    def _dead_letters(self) -> Generator[DeadLetters]:
        self.open()
        letters = drive(self._store.dead_letters())
        try:
            yield letters
        finally:
            drive(letters.close())

    @property
    def _rules(self) -> dict[str, operators.Rules]:
        return {
            name: operators.Rules(consumer, consumer.queue.session)
            for name, consumer in self._consumers.items()
        }

    def publisher(self) -> MarkingPublisher:
        """Return the publisher of `send`, opened at the first call."""
        self.open()
        if self._publisher is None:
            self._publisher = drive(self._store.publisher())
        return self._publisher

    @contextmanager
    def with_store(self, store: Store) -> Generator[None]:
        """Use another store inside the block; for tests.

        Raises:
            ConfigurationError: the app's own store is open.
        """
        if self._is_open:
            raise ConfigurationError("the app's store is open: close() it before a test")
        self._store, own = store, self._store
        try:
            yield
        finally:
            self.close()
            self._store = own

    def skip_waits(self) -> int:
        """Make every retry and scheduled message due now; return how many there were. For tests:
        it breaks the promise of a delay, never that of an order."""
        self.open()
        with self._lock:
            return drive(self._store.skip_waits())

    def _make_store(self, url: str) -> Store:
        scheme = str(url).split(":", 1)[0]
        if scheme == "sqlite":
            return SqliteStore(url, settings=self.settings, prefix=self._table_prefix)
        if scheme == "memory":
            return MemoryStore(settings=self.settings)
        if scheme in ("postgresql", "postgres"):
            return self._make_postgres(url)
        raise ConfigurationError(
            f"store {url!r}: write sqlite:///file.db (relative), sqlite:////file.db (absolute), "
            "postgresql://user:password@host/database, or memory:// for tests"
        )

    def _make_postgres(self, url: str) -> Store:
        try:
            from procession.stores.postgres import PostgresStore  # noqa: PLC0415  an extra
        except ImportError as error:
            raise ConfigurationError(
                "a store on PostgreSQL needs psycopg: pip install 'procession[postgres]'"
            ) from error
        return PostgresStore(url, settings=self.settings, prefix=self._table_prefix)

    @property
    def database(self) -> Path | None:
        """The store's file, where it has one."""
        return self._store.path if isinstance(self._store, SqliteStore) else None


class _AlertHooks:
    """Hands alerts to the user's hooks."""

    def __init__(self, hooks: list[AlertHook]) -> None:
        self._hooks = hooks

    def emit(self, event: Event, fields: dict[str, Any]) -> None:
        if event is not Event.ALERT:
            return
        for hook in self._hooks:
            try:
                hook(fields)
            except Exception:  # one hook's fault must not keep the alert from the next
                LOGGER.exception("an alert hook failed")
