"""The deliveries of one transaction on their way through it: judged, run, and given an end.

Writes nothing itself but what handlers write: everything else is collected in `changes`, which the
store writes last before the commit.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeAlias

from procession.abc import Changes, Clock, DeadLetter, Entry, Hold, InboxRow, Lane
from procession.config import RetryPolicy, Settings
from procession.core.crowding import Crowd
from procession.core.inbox import Verdict, judge
from procession.core.keys import KEY_BYTES_MAX
from procession.core.retry import GiveUp, RunAgain, after_failure
from procession.errors import HandlerTimeout, MessageError, Reason
from procession.flows.context import Context, Route
from procession.message import BodyFormat, Delivery
from procession.outcome import Cause, End, InboxState, Outcome, Reject, Retry
from procession.telemetry import Event, Instrument

_LOGGER = logging.getLogger("procession.handler")
REMEMBERED_MAX = 10_000
TRACEPARENTS_MAX = 128
_TRACEPARENT = re.compile(r'"traceparent":\s*"([0-9a-z-]*)"')
# The longest wait that `Retry(after=...)` is granted.
POSTPONED_MS_MAX = 366 * 24 * 3_600_000
FOREIGN = int(BodyFormat.JSON)


class Invoke(Protocol):
    """Calls a handler; where `is_async`, its result is awaited."""

    @property
    def is_async(self) -> bool: ...  # noqa: D102  said above

    def __call__(self, payload: Any, context: Context, /) -> Any: ...  # noqa: D102  said above


class Consumer(Protocol):
    """What the flow needs to know of a consumer.

    Attributes:
        keyed_by_id: the dedup key is the producer's message id, as it stands.
        hashed_as_it_stands: the fingerprint is SHA-256 of a canonical body, with no rule of the
            user's.
    """

    name: str
    retry: RetryPolicy
    on_conflict: Literal["dead-letter", "alert"]
    commit: Literal["batch", "each"]
    hashed_as_it_stands: bool
    route: Route

    @property
    def keyed_by_id(self) -> bool: ...  # noqa: D102  said above

    def key_of(self, delivery: Delivery) -> bytes:
        """Return the dedup key, or raise `MessageError`."""
        ...

    def fingerprint_of(self, delivery: Delivery) -> bytes:
        """Return the fingerprint, or raise `MessageError`."""
        ...

    def read(self, delivery: Delivery) -> tuple[Invoke, Any]:
        """Return the handler and a freshly decoded, validated payload, or raise `MessageError`."""
        ...


_Work: TypeAlias = tuple[bytes, bytes, InboxState | None, Invoke, Any]


class TransactionLost(Exception):
    """A handler's failure took the whole transaction with it."""


class LaneMemory:
    """What one lane knows between its batches; lost with the process, and nothing depends on it.

    Attributes:
        alone: positions of messages that failed in company: their next run is a lone one.
        cut_short: positions whose last lone run the store cut short: it is not counted anew.
        to_take: likewise of a broker's messages: they are taken into the store before they run.
        runs: begun runs of messages that have not ended, by position.
        raced: positions of a batch that lost a race for a key.
        reruns: runs that began and did not commit since the last commit.
        current, since_s: the delivery whose handler runs now and since when, for the watchdog.
        timed_out: the watchdog cancelled the running async handler.
        own_thread: the flow runs in a task that nobody but the watchdog cancels.
        crowd: the lanes of its consumer, which make way for each other.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        instrument: Instrument,
        draw: Callable[[], float],
        suspects: Sequence[int] = (),
        crowd: Crowd | None = None,
    ) -> None:
        self.settings = settings
        self.crowd = crowd or Crowd(1)
        self.clock = clock
        self.instrument = instrument
        self.draw = draw
        self.alone: set[int] = set(suspects)
        self.cut_short: set[int] = set()
        self.to_take: set[int] = set()
        self.runs: dict[int, int] = {}
        self.raced: set[int] = set()
        self.reruns = 0
        self.current: Delivery | None = None
        self.since_s = 0.0
        self.timed_out = False
        self.own_thread = False

    def runs_alone(self, delivery: Delivery) -> bool:
        """Whether the next run of a delivery must be a lone one."""
        return delivery.attempts > 0 or delivery.position in self.alone

    def watch(self, delivery: Delivery, now_s: float) -> None:
        """Let the watchdog know that code of the user works on a delivery."""
        self.since_s = now_s
        self.timed_out = False
        self.current = delivery

    def committed(self, ended: Sequence[Delivery]) -> None:
        """Forget what has ended."""
        self.reruns = 0
        self.raced.clear()
        if self.runs or self.alone or self.to_take:
            for delivery in ended:
                self.runs.pop(delivery.position, None)
                (self.alone if delivery.lock is None else self.to_take).discard(delivery.position)
        for remembered in (self.alone, self.to_take, self.cut_short, self.runs):
            if len(remembered) > REMEMBERED_MAX:
                remembered.clear()

    def rolled_back(self, ran: Sequence[Delivery]) -> None:
        """Remember that runs were for nothing."""
        self.current = None
        self.reruns += len(ran)
        for delivery in ran:
            self.runs[delivery.position] = self.runs.get(delivery.position, 0) + 1


class Batch:
    """One transaction's deliveries.

    Args:
        alone: it is a lone run: a failure counts as an attempt.
        exhausted: the message has no run left: unless its key has an end, it becomes a dead letter.
        held_sessions: sessions with messages in the store, behind which a broker's must go.

    Attributes:
        changes: what the store is to write.
        ended: deliveries that this transaction ends (or takes into the store).
        left: deliveries that stay where they are, in their order.
        events: to be told after the commit.
        began_s: when it was made, by the monotonic clock.
        begun: deliveries whose handler began, in that order: a lane counts its `mark`s likewise.
    """

    def __init__(  # noqa: PLR0913  wired by the flow alone
        self,
        consumer: Consumer,
        lane: Lane,
        memory: LaneMemory,
        deliveries: Sequence[Delivery],
        *,
        alone: bool = False,
        exhausted: bool = False,
        held_sessions: set[bytes] | None = None,
    ) -> None:
        self._consumer = consumer
        self._lane = lane
        self._memory = memory
        self.deliveries = deliveries
        self.alone = alone
        self._exhausted = exhausted
        self._held_sessions: set[bytes | None] = {*(held_sessions or ())}
        self._seen: dict[bytes, tuple[InboxState, bytes] | None] = {}
        self._blocked: set[bytes | None] = set()
        self.changes = Changes()
        self.ended: list[Delivery] = self.changes.removed
        self.left: list[Delivery] = []
        self.events: list[tuple[Event, dict[str, Any]]] = []
        self.ran: list[Delivery] = []
        self.begun: list[Delivery] = []
        self._judged_ahead: dict[bytes, InboxRow] | None = None
        self._wall_ms = 0
        self.began_s = memory.clock.monotonic_s()
        self.handler_s = 0.0

    @property
    def runs(self) -> int:
        """How many handlers ran."""
        return len(self.begun)

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many messages this transaction ends, by end, then by cause ("" for none)."""
        found: dict[str, dict[str, int]] = {}
        for (end, cause), number in self.changes.counts.items():
            found.setdefault(end.value, {})[cause.value if cause else ""] = number
        return found

    def processed(self) -> Iterator[dict[str, Any]]:
        """Tell of each message that this transaction processed."""
        for delivery in self.ran:
            key = self._consumer.key_of(delivery)
            yield {"consumer": self._consumer.name, **_message(delivery, key)}

    def fence(self) -> None:
        """Make the commit conditional on every session of the batch."""
        self.changes.fence.update(
            delivery.session for delivery in self.deliveries if delivery.session is not None
        )

    async def run(self) -> None:
        """Judge and run the deliveries in order, until the budget is used."""
        memory, consumer, lane = self._memory, self._consumer, self._lane
        self._judged_ahead = await self._judge_ahead()
        clock = memory.clock.monotonic_s
        now = clock()
        deadline = now + memory.settings.batch_budget_ms / 1000
        self._wall_ms = memory.clock.wall_ms()
        blocked, alone = self._blocked, memory.alone
        sql, name, route, runs = lane.sql, consumer.name, consumer.route, memory.runs
        for index, delivery in enumerate(self.deliveries):
            if delivery.session in blocked:
                self.left.append(delivery)
                continue
            if (delivery.attempts or alone) and self._waits_for_lone_run(delivery):
                self._leave(delivery)
                continue
            # From here on: rules and validators are the user's code, too.
            memory.watch(delivery, now)
            work = self._prepare(delivery)
            if work is None:
                memory.current = None
                continue
            key, fingerprint, expected, invoke, payload = work
            context = Context(sql, delivery, name, key, route, runs.get(delivery.position, 0) + 1)
            lane.mark()
            self.begun.append(delivery)
            try:
                result = invoke(payload, context)
                if result is not None or invoke.is_async:
                    await _finish(result, invoke)
                context.finish()
                fault = sql.doomed or sql.lost
                if fault is not None:
                    raise fault  # noqa: TRY301  the handler may have swallowed it
            except BaseException as error:  # the one place where all is caught
                memory.current = None
                context.close()
                if _ends_the_lane(error, invoke, memory):
                    raise
                await self._failed(delivery, key, fingerprint, error)
            else:
                memory.current = None
                self._succeeded(delivery, key, fingerprint, expected)
                self.changes.sends += context.close()
            after = clock()
            self.handler_s += after - now
            now = after
            if now >= deadline:
                self.left += self.deliveries[index + 1 :]
                break
        if self.ran:
            self.changes.counts[End.PROCESSED, None] += len(self.ran)

    def _prepare(self, delivery: Delivery) -> _Work | None:
        """Identify, judge and decode; None where that settled the delivery already."""
        consumer = self._consumer
        key = delivery.message_id
        if (
            self._judged_ahead is None
            and consumer.hashed_as_it_stands
            and delivery.format != FOREIGN
            and key.isascii()
            and key.strip()
            and len(key) <= KEY_BYTES_MAX
            and 0 not in key
        ):
            # The common case, without a call: the producer's id, and the body as it stands.
            fingerprint = sha256(delivery.body).digest()
        else:
            try:
                key, fingerprint = consumer.key_of(delivery), consumer.fingerprint_of(delivery)
            except (Exception, SystemExit) as error:  # noqa: BLE001  a rule is the user's code
                self._refuse(delivery, self._as_message_error(error, Reason.BAD_KEY))
                return None
            if self._judged_ahead is not None:
                row = self._judged_ahead.get(key)
                delivery.state = row.state if row else None
                delivery.fingerprint = row.fingerprint if row else None
        expected: InboxState | None = None
        if delivery.state is not None or key in self._seen:
            fresh, expected = self._judged(delivery, key, fingerprint)
            if not fresh:
                return None
        if delivery.expires_ms is not None and delivery.expires_ms <= self._wall_ms:
            self._expire(delivery, key, fingerprint, expected)
            return None
        if self._exhausted:
            self._kill(
                delivery,
                key,
                fingerprint,
                Reason.VANISHED,
                f"its {consumer.retry.max_attempts} lone runs began, and the last of them never "
                "ended: the process died, hung or lost its connection inside the handler",
            )
            return None
        if delivery.lock is not None and self._must_be_held(delivery):
            after_ms = 0 if delivery.position in self._memory.to_take else None
            self._hold(delivery, key, fingerprint, after_ms=after_ms, attempts=0)
            return None
        try:
            if delivery.session is not None and not delivery.session.isascii():
                check_session(delivery.session)
            invoke, payload = consumer.read(delivery)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a validator is the user's code
            fault = self._as_message_error(error, Reason.INVALID_PAYLOAD)
            self._kill(delivery, key, fingerprint, fault.reason, fault.detail)
            return None
        return key, fingerprint, expected, invoke, payload

    def _as_message_error(self, error: BaseException, reason: Reason) -> MessageError:
        if isinstance(error, MessageError):
            return error
        return MessageError(reason, describe(error, self._memory.settings.error_chars_max))

    def _succeeded(
        self,
        delivery: Delivery,
        key: bytes,
        fingerprint: bytes,
        expected: InboxState | None,
    ) -> None:
        self._seen[key] = (InboxState.DONE, fingerprint)
        entry = Entry(key, fingerprint)
        if delivery.replay_of is not None or expected is not None:
            entry.expected = expected
            entry.out_of_order = delivery.replay_of is not None
        self.changes.entries.append(entry)
        self.ran.append(delivery)
        self.ended.append(delivery)

    # Verdicts.

    async def _judge_ahead(self) -> dict[bytes, InboxRow] | None:
        """Ask the inbox about keys that the fetch could not know; None where it did."""
        deliveries = self.deliveries
        if self._consumer.keyed_by_id and deliveries[0].lock is None:
            return None
        keys = []
        memory = self._memory
        for delivery in deliveries:
            if self._waits_for_lone_run(delivery):
                continue
            memory.watch(delivery, memory.clock.monotonic_s())
            try:
                keys.append(self._consumer.key_of(delivery))
            except (Exception, SystemExit):  # noqa: BLE001, S112  `_prepare` meets it again
                continue
            finally:
                memory.current = None
        return await self._lane.judge(keys)

    def _waits_for_lone_run(self, delivery: Delivery) -> bool:
        return delivery.lock is None and not self.alone and self._memory.runs_alone(delivery)

    def _must_be_held(self, delivery: Delivery) -> bool:
        """Whether a broker's message is to be taken into the store: it failed, or its session has
        messages there. It is never run alone before."""
        return delivery.position in self._memory.to_take or delivery.session in self._held_sessions

    def _judged(
        self, delivery: Delivery, key: bytes, fingerprint: bytes
    ) -> tuple[bool, InboxState | None]:
        """Settle a delivery whose key is known, or say that it may run, and from which state its
        run moves the key on (None: the key is new).
        """
        state, recorded = delivery.state, delivery.fingerprint
        own = delivery.replay_of is not None or (delivery.held and state == InboxState.HELD)
        if key in self._seen:
            earlier = self._seen[key]
            if earlier is None:  # the first copy failed: this one waits for what becomes of it
                self._leave(delivery)
                return False, None
            state, recorded = earlier
            own = False
        match judge(state, recorded, fingerprint, own=own):
            case Verdict.FRESH:
                return True, None if state is None else InboxState(state)
            case Verdict.DUPLICATE | Verdict.HELD:
                self._end(delivery, key, End.DUPLICATE, self._cause(delivery))
            case Verdict.DEAD:
                self._bury(delivery, key, fingerprint)
            case Verdict.CONFLICT:
                self._conflict(delivery, key, fingerprint, state)
            case Verdict.BUSY:
                self._leave(delivery)
        return False, None

    def _cause(self, delivery: Delivery) -> Cause:
        if delivery.replay_of is not None:
            return Cause.REPLAYED
        if delivery.position in self._memory.raced:
            return Cause.CONCURRENT
        if delivery.lock_expired:
            return Cause.LOCK_EXPIRED
        return Cause.REDELIVERED if delivery.delivery_count > 1 else Cause.RESENT

    def _conflict(
        self, delivery: Delivery, key: bytes, fingerprint: bytes, state: int | None
    ) -> None:
        did = "took effect" if state == InboxState.DONE else "is known"
        detail = (
            f"key {_text(key)} {did} with another payload: one id was used for two operations, or "
            "the message was changed after it was sent; nothing of this copy took effect"
        )
        self._alert("conflict", delivery, key, detail)
        if self._consumer.on_conflict == "alert" and delivery.replay_of is None:
            self._end(delivery, key, End.CONFLICT, None, detail)
            return
        self._write_dead_letter(delivery, key, fingerprint, Reason.CONFLICT, detail)
        self._end(delivery, key, End.DEAD_LETTERED, None, detail, Reason.CONFLICT)

    # Ends.

    def _end(
        self,
        delivery: Delivery,
        key: bytes | None,
        end: End,
        cause: Cause | None,
        detail: str = "",
        reason: Reason | None = None,
    ) -> None:
        self.ended.append(delivery)
        self.changes.counts[end, cause] += 1
        self.events.append(
            (
                Event.MESSAGE_ENDED,
                {
                    "consumer": self._consumer.name,
                    "end": end.value,
                    "cause": cause.value if cause else "",
                    "reason": str(reason or ""),
                    "detail": detail,
                    **_message(delivery, key),
                },
            )
        )

    def _write_dead_letter(
        self,
        delivery: Delivery,
        key: bytes | None,
        fingerprint: bytes | None,
        reason: Reason,
        detail: object,
    ) -> str:
        text = safe_text(detail, self._memory.settings.error_chars_max)
        self.changes.dead_letters.append(DeadLetter(delivery, key, fingerprint, reason, text))
        return text

    def _expire(
        self, delivery: Delivery, key: bytes, fingerprint: bytes, expected: InboxState | None
    ) -> None:
        self.changes.entries.append(Entry(key, fingerprint, InboxState.DONE, End.EXPIRED, expected))
        self._seen[key] = (InboxState.DONE, fingerprint)
        self._end(delivery, key, End.EXPIRED, None, "it was too old when its turn came")

    def _bury(self, delivery: Delivery, key: bytes, fingerprint: bytes) -> None:
        """Settle a copy of a dead letter: it is counted there and not run."""
        self.changes.dead_letters.append(
            DeadLetter(
                delivery,
                key,
                fingerprint,
                Reason.FAILED,
                "a copy of a dead letter",
                is_copy=True,
            )
        )
        self._end(delivery, key, End.DEAD_LETTERED, self._cause(delivery))

    def _refuse(self, delivery: Delivery, error: MessageError) -> None:
        """End a message that has no key."""
        text = self._write_dead_letter(delivery, None, None, error.reason, error.detail)
        self._end(delivery, None, End.DEAD_LETTERED, None, text, error.reason)

    def _kill(
        self,
        delivery: Delivery,
        key: bytes | None,
        fingerprint: bytes | None,
        reason: Reason,
        detail: object,
    ) -> None:
        text = self._write_dead_letter(delivery, key, fingerprint, reason, detail)
        if key is not None and fingerprint is not None:
            self._seen[key] = (InboxState.DEAD, fingerprint)
            if delivery.state != InboxState.DEAD:
                expected = InboxState.HELD if delivery.state == InboxState.HELD else None
                self.changes.entries.append(
                    Entry(key, fingerprint, InboxState.DEAD, End.DEAD_LETTERED, expected)
                )
        self._end(delivery, key, End.DEAD_LETTERED, None, text, reason)

    def _leave(self, delivery: Delivery) -> None:
        """Leave it, and all later ones of its session, where they are."""
        self.left.append(delivery)
        if delivery.session is not None:
            self._blocked.add(delivery.session)

    def _hold(
        self,
        delivery: Delivery,
        key: bytes,
        fingerprint: bytes,
        *,
        after_ms: int | None,
        attempts: int,
    ) -> None:
        """Keep it in the store for another run; later ones of its session wait behind it."""
        take = delivery.lock is not None
        self.changes.holds.append(Hold(delivery, after_ms=after_ms, attempts=attempts, take=take))
        if not take:
            if delivery.session is not None:
                self._blocked.add(delivery.session)
            return
        self.ended.append(delivery)
        self.changes.entries.append(Entry(key, fingerprint, InboxState.HELD, None))
        self._seen[key] = (InboxState.HELD, fingerprint)
        if delivery.session is not None:
            self._held_sessions.add(delivery.session)

    # Failures.

    async def _failed(
        self, delivery: Delivery, key: bytes, fingerprint: bytes, error: BaseException
    ) -> None:
        lane, memory = self._lane, self._memory
        if lane.sql.lost is not None:
            raise lane.sql.lost from error
        if memory.timed_out and isinstance(error, asyncio.CancelledError):
            error = self._timed_out()
        usable = await lane.undo()
        text = describe(error, memory.settings.error_chars_max)
        if not isinstance(error, Reject):
            self._tell_failure(delivery, key, text)
            if not isinstance(error, Retry):
                # Where it happened, for whoever asks for it: --log-level debug.
                _LOGGER.debug("message %r failed", delivery.message_id, exc_info=error)
        if not usable:
            if not self.alone:
                failed = memory.alone if delivery.lock is None else memory.to_take
                failed.add(delivery.position)
                raise TransactionLost from error
            await lane.rollback()
            await lane.begin()
        memory.rolled_back([delivery])
        if isinstance(error, Reject):
            self._kill(delivery, key, fingerprint, Reason.REJECTED, error.reason)
        elif self.alone:
            self._after_lone_run(delivery, key, fingerprint, error, text)
        else:
            self._seen[key] = None
            self._after_run_in_company(delivery, key, fingerprint, error, text)

    def failed_later(self, run: int, error: BaseException) -> None:
        """A deferred statement of the handler that ran as the `run`-th failed, which was seen after
        it had returned: its message runs alone next. The transaction is lost.
        """
        delivery = self.begun[run]
        failed = self._memory.alone if delivery.lock is None else self._memory.to_take
        failed.add(delivery.position)
        text = describe(error, self._memory.settings.error_chars_max)
        self._tell_failure(delivery, self._consumer.key_of(delivery), text)

    def refuse_unread(self) -> None:
        """End the one message, whose very key rule never ends: a dead letter without a key."""
        (delivery,) = self.deliveries
        self._refuse(
            delivery,
            MessageError(
                Reason.VANISHED,
                "the rule for its dedup key never ended, or the process died in it, each time",
            ),
        )

    def fail(self, error: BaseException) -> None:
        """Fail the lone run of the one delivery: the store refused what it wrote."""
        delivery = self.deliveries[0]
        key = self._consumer.key_of(delivery)
        fingerprint = self._consumer.fingerprint_of(delivery)
        text = describe(error, self._memory.settings.error_chars_max)
        self._tell_failure(delivery, key, text)
        self._after_lone_run(delivery, key, fingerprint, error, text)

    def _timed_out(self) -> HandlerTimeout:
        """The cancellation was the watchdog's, so it is the handler that failed."""
        self._memory.timed_out = False
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        limit_s = self._memory.settings.handler_limit_ms / 1000
        return HandlerTimeout(
            f"the handler ran longer than {limit_s:g} s (settings.handler_limit_ms) and was "
            "cancelled"
        )

    def _after_run_in_company(
        self, delivery: Delivery, key: bytes, fingerprint: bytes, error: BaseException, text: str
    ) -> None:
        if isinstance(error, Retry):
            # The handler decided with open eyes, so it needs no lone run to be believed.
            delivery.attempts += 1
            self._after_lone_run(delivery, key, fingerprint, error, text)
        elif delivery.lock is not None:
            self._hold(delivery, key, fingerprint, after_ms=0, attempts=0)
        else:
            self._memory.alone.add(delivery.position)
            self._leave(delivery)

    def _after_lone_run(
        self, delivery: Delivery, key: bytes, fingerprint: bytes, error: BaseException, text: str
    ) -> None:
        asked = min(error.after_ms, POSTPONED_MS_MAX) if isinstance(error, Retry) else None
        delivery.errors = add_error(delivery.errors, text)
        match after_failure(
            self._consumer.retry,
            max(1, delivery.attempts),
            draw=self._memory.draw(),
            asked_ms=asked,
        ):
            case RunAgain(after_ms):
                self._hold(
                    delivery,
                    key,
                    fingerprint,
                    after_ms=after_ms,
                    attempts=delivery.attempts,
                )
                self.events.append(
                    (
                        Event.MESSAGE_RETRYING,
                        {
                            "consumer": self._consumer.name,
                            "attempt": delivery.attempts,
                            "after_ms": after_ms,
                            **_message(delivery, key),
                        },
                    )
                )
            case GiveUp():
                self._kill(
                    delivery,
                    key,
                    fingerprint,
                    Reason.FAILED,
                    f"{delivery.attempts} runs failed, the last with: {text}",
                )

    def _tell_failure(self, delivery: Delivery, key: bytes, text: str) -> None:
        # Told at once: the batch may still be rolled back, but the failure has happened.
        self._memory.instrument.emit(
            Event.MESSAGE_FAILED,
            {
                "consumer": self._consumer.name,
                "attempt": delivery.attempts,
                "error": text,
                **_message(delivery, key),
            },
        )

    def _alert(self, what: str, delivery: Delivery, key: bytes | None, detail: str) -> None:
        self.events.append(
            (
                Event.ALERT,
                {
                    "consumer": self._consumer.name,
                    "what": what,
                    "detail": detail,
                    **_message(delivery, key),
                },
            )
        )


async def _finish(result: Any, invoke: Invoke) -> None:
    """Await an async handler; refuse results that are mistakes."""
    if invoke.is_async:
        result = await result
    elif inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise TypeError(
            "a def handler returned an awaitable, which nobody would await: write async def"
        )
    elif inspect.isgenerator(result):
        raise TypeError("a def handler returned a generator, which nobody would run")
    if isinstance(result, Outcome) or (isinstance(result, type) and issubclass(result, Outcome)):
        raise TypeError(f"a handler returned {result!r}: outcomes are raised, not returned")


def _ends_the_lane(error: BaseException, invoke: Invoke, memory: LaneMemory) -> bool:
    """Whether it is no failure of the handler: the process, the task or the flow is to end."""
    if isinstance(error, asyncio.CancelledError):
        task = _current_task()
        if task is None or task.cancelling() == 0 or memory.timed_out:
            return False
        if memory.own_thread:  # the handler cancelled itself
            task.uncancel()
            return False
        return True
    if isinstance(error, GeneratorExit):
        # Thrown into the flow's coroutine from outside, where no task runs it; else the handler's.
        return invoke.is_async and _current_task() is None
    # Python interrupts the main thread only; on any other the handler raised it itself.
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def check_session(session: bytes) -> None:
    """Refuse a session key that is no text: other programs write into queues, too.

    Raises:
        MessageError: `bad-session`.
    """
    try:
        session.decode()
    except UnicodeDecodeError as error:
        raise MessageError(
            Reason.BAD_SESSION,
            f"the session key is {len(session)} bytes that are no UTF-8 ({session[:40]!r}); send "
            "it as hexadecimal or Base64 text",
        ) from error


def describe(error: BaseException, chars_max: int) -> str:
    """Return the error as text, whatever its own `__str__` does."""
    return safe_text(error, chars_max, prefix=f"{type(error).__name__}: ")


def safe_text(value: object, chars_max: int, *, prefix: str = "") -> str:
    """Return any object as text that every store takes, whatever its own `__str__` does."""
    try:
        text = str(value)
    except (Exception, SystemExit):  # noqa: BLE001  the text of a user's exception is user's code
        text = "(its text could not be made)"
    return f"{prefix}{text}"[:chars_max].encode("utf-8", "replace").decode()


def add_error(errors: str | None, text: str) -> str:
    """Return the JSON list of a message's errors with one more."""
    try:
        earlier = json.loads(errors) if errors else []
    except ValueError:  # another program wrote it
        earlier = [errors]
    return json.dumps([*earlier, text])


def traceparents(deliveries: Sequence[Delivery]) -> list[str]:
    """Return the producers' trace contexts, each once, in order, up to `TRACEPARENTS_MAX`: what
    spans link to.
    """
    found: dict[str, None] = {}
    for delivery in deliveries:
        raw = delivery.raw_headers
        if isinstance(raw, str):
            # Found in the text, which takes a fifth of the time that reading all headers takes.
            match = _TRACEPARENT.search(raw)
            traceparent = None if match is None else match[1]
        else:
            traceparent = delivery.header("traceparent")
        if traceparent is not None:
            found[traceparent] = None
            if len(found) == TRACEPARENTS_MAX:
                break
    return list(found)


def _message(delivery: Delivery, key: bytes | None) -> dict[str, str | None]:
    """Say which message it is, in the fields that events share."""
    return {
        "key": _text(key),
        "message_id": _text(delivery.message_id),
        "session": _text(delivery.session),
        "correlation_id": delivery.header("correlation-id"),
    }


def _text(key: bytes | None) -> str | None:
    return None if key is None else key.decode(errors="replace")
