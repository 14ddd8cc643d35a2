"""Reading: what a lane's next batch takes, of the sessions that it holds and of what has none."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from procession.abc import Fetched
from procession.config import Settings
from procession.message import Delivery
from procession.outcome import InboxState
from procession.stores.postgres.connection import Place, connect, ours
from procession.stores.postgres.guard import OURS, Guard
from procession.stores.postgres.owned import Owned, Read, Reading, ReadPlan
from procession.stores.postgres.statements import statements
from procession.stores.postgres.wire import (
    Result,
    StatementFailed,
    Wire,
    bool_array,
    bytes_array,
    int_array,
    text_array,
)

SESSION_SHARE_MIN = 16
# What has no session is looked for from the last one taken on, which passes over dead rows, and
# from the start once in this time, for what was committed late.
FULL_LOOK_S = 0.5
BATCH_BYTES_MAX = 32 * 1024 * 1024


class Reader:
    """The connection of a lane, the sessions it holds, and how it reads them."""

    def __init__(
        self,
        place: Place,
        prefix: str,
        *,
        subscription: int,
        worker: str,
        number: int,
        settings: Settings,
    ) -> None:
        self._place = place
        self._connection = connect(place, lane=True)
        self._statements = statements(prefix, place.schema)
        self._wire = Wire(self._connection, named=not self._connection.pooled)
        self._wire.on()
        self._guard = Guard(self._connection, self._wire, prefix)
        self._subscription = subscription
        self._worker = worker
        self._number = number
        self._suspect_batch = settings.suspect_batch
        self._defaults = self._planner_defaults()
        self._owned: dict[bytes, Owned] = {}
        self._order: list[bytes] = []
        self._front: set[bytes] = set()
        self._left: set[bytes] = set()
        self._cleared: list[bytes] = []
        self._lone: Fetched | None = None
        self._after_commit: list[Callable[[], None]] = []
        self._targets: set[int] = set()
        self._keyless_after = 0
        self._keyless_turn = False
        self._keyless_look_s = 0.0
        self._suspects: tuple[int, int] = (0, 0)
        self._reads: dict[int, Read] = {}
        self._reading = Reading([], [], [], set())
        self._look = True
        self._full_look_s = 0.0

    def meaning(self, failed: StatementFailed) -> BaseException:
        """Return what a failed statement means, whoever sent it."""
        if self._guard.taken is not None:
            return self._guard.taken
        if failed.tag == OURS:
            return ours(failed.error, "a statement of the batch's own rows") or failed.error
        return self._guard.told(failed)

    def _own(self, key: bytes, owned: Owned) -> None:
        if key not in self._owned:
            self._order.append(key)
        self._owned[key] = owned

    def _forget(self, key: bytes) -> None:
        if self._owned.pop(key, None) is not None:
            with contextlib.suppress(ValueError):
                self._order.remove(key)

    def _send(self, name: str, *, keep: bool = True, **values: Any) -> None:
        statement = self._statements[name]
        self._wire.send(
            statement.text,
            statement.bind(
                values,
                subscription=self._subscription,
                worker=self._worker,
                lane=self._number,
            ),
            (),
            statement.formats,
            tag=OURS,
            keep=keep,
        )

    def _send_give_up(
        self,
        sessions: dict[bytes, Owned],
        waits: dict[bytes, int] | None = None,
        lows: dict[bytes, int | None] | None = None,
        passed: Collection[bytes] = (),
    ) -> None:
        keys = sorted(sessions)
        self._send(
            "give_up",
            keys=bytes_array(keys),
            holders=text_array([sessions[key].holder for key in keys]),
            waits=int_array([(waits or {}).get(key) for key in keys]),
            lows=int_array(
                [
                    lows[key]
                    if lows is not None and key in lows
                    else None
                    if sessions[key].drained
                    else max(1, sessions[key].cursor + 1)
                    for key in keys
                ]
            ),
            passed=bool_array([key in passed for key in keys]),
        )

    def _planner_defaults(self) -> tuple[bytes, bytes]:
        """Return what `plan_by_index` changes, as it was: names and values."""
        self._wire.on()
        self._wire.send(
            b"SELECT name, setting FROM pg_settings WHERE name = ANY ('{enable_seqscan,"
            b"enable_bitmapscan,enable_hashjoin,enable_mergejoin,enable_material,enable_memoize,"
            b"jit,plan_cache_mode}')",
            (),
            tag=OURS,
            keep=True,
        )
        try:
            rows = self._wire.drain()[0].rows()
        except StatementFailed as failed:
            raise self.meaning(failed) from failed.error
        return text_array([row[0] for row in rows]), text_array([row[1] for row in rows])

    # Reading.

    def _send_reading(self, limit: int) -> None:
        self._reads.clear()
        self._reading = Reading([], [], [], set())
        self._send("plan_by_index", keep=False)
        self._plan = self._plan_reading(limit)
        if self._plan.keyless_first:
            self._send("fetch_keyless", after=self._keyless_low(), limit=self._plan.limit)
        else:
            if self._plan.keys:
                self._send_sessions(self._plan.keys, self._plan.limit, self._plan.each)
            self._send("keyless_waits", after=self._keyless_low())
        names, values = self._defaults
        self._send("plan_as_before", keep=False, names=names, values=values)

    def _send_sessions(self, keys: list[bytes], limit: int, each: int) -> None:
        owned = [self._owned[key] for key in keys]
        named: dict[str, Any] = {
            "keys": bytes_array(keys),
            "holders": text_array([session.holder for session in owned]),
        }
        self._send("tokens", **named)
        self._send(
            "fetch",
            **named,
            cursors=int_array([session.cursor for session in owned]),
            each=each,
            limit=limit,
        )

    def _plan_reading(self, limit: int) -> ReadPlan:
        owned = self._owned
        keys = list(self._order)
        worst = max((session.suspicion for session in owned.values()), default=0)
        if worst > 1:
            keys = [key for key in keys if owned[key].suspicion > 1]
            return ReadPlan(keys, 1, 1, keyless_first=False, alone=True)
        if worst:
            keys.sort(key=lambda key: not owned[key].suspicion)
            limit = min(limit, self._suspect_batch)
            return ReadPlan(keys, limit, limit, keyless_first=False, alone=False)
        active = sum(not owned[key].drained for key in keys)
        each = max(SESSION_SHARE_MIN, -(-limit // max(1, active)))
        keyless = self._keyless_turn or not keys
        return ReadPlan(keys, limit, min(each, limit), keyless_first=keyless, alone=False)

    def _keyless_low(self) -> int:
        now = time.monotonic()
        if now - self._keyless_look_s > FULL_LOOK_S:
            self._keyless_after, self._keyless_look_s = 0, now
        return self._keyless_after

    def _read(self, results: list[Result], limit: int) -> Fetched:
        plan = self._plan
        limit = plan.limit
        if plan.alone:
            return self._read_suspects(results, plan)
        if plan.keyless_first:
            deliveries, changed = self._read_keyless_first(results, plan)
        else:
            deliveries, changed = self._read_sessions_first(results, plan)
        if self._lone is not None:
            fetched, self._lone = self._lone, None
            return fetched
        self._look = self._look or len(deliveries) < limit
        changed = self._trust_cleared() or changed
        if not deliveries and self._reading.tokens:
            changed = self._forget_tokens_now() or changed
        return Fetched(deliveries=_within(self._in_order(deliveries)), changed=changed)

    def _read_keyless_first(
        self, results: list[Result], plan: ReadPlan
    ) -> tuple[list[Delivery], bool]:
        size, through = self._suspects
        rows = results[-1].rows() or self._keyless_from_start(plan.limit)
        if size and rows:
            self._lone = self._read_keyless_suspects(plan.limit, size, through)
            return [], False
        changed = bool(size) and self._trust_keyless()
        deliveries = self._keyless(rows)
        room = plan.limit - len(rows)
        if room and plan.keys:
            self._send("plan_by_index", keep=False)
            self._send_sessions(plan.keys, room, plan.each)
            names, values = self._defaults
            self._send("plan_as_before", keep=False, names=names, values=values)
            tokens, sessions = self._wire.drain()[-2:]
            deliveries += self._sessions(tokens, sessions, plan, room)
        self._keyless_turn = not plan.keys and bool(rows)
        return deliveries, changed

    def _read_sessions_first(
        self, results: list[Result], plan: ReadPlan
    ) -> tuple[list[Delivery], bool]:
        size, through = self._suspects
        ((waits,),) = results[-1].rows()
        deliveries: list[Delivery] = []
        changed = False
        if plan.keys:
            deliveries += self._sessions(results[-3], results[-2], plan, plan.limit)
        room = min(plan.limit, size or plan.limit) - len(deliveries)
        if not waits:
            if not deliveries:
                deliveries += self._keyless(self._keyless_from_start(room))
            changed = bool(size) and not deliveries and self._trust_keyless()
        elif size == 1:
            if not deliveries:
                self._lone = self._read_keyless_suspects(plan.limit, size, through)
        elif room > 0:
            self._send("fetch_keyless", after=self._keyless_after, limit=room)
            rows = self._wire.drain()[-1].rows()
            deliveries += self._keyless(rows)
            if size and (not rows or rows[0][2] > through):
                changed = self._trust_keyless()
        else:
            self._keyless_turn = True
        return deliveries, changed

    def _in_order(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Put first what an earlier batch left, which may have to run alone; the rest by number."""
        front = self._front
        deliveries.sort(key=lambda found: (found.session not in front, found.position))
        return deliveries

    def _keyless_from_start(self, limit: int) -> list[tuple[Any, ...]]:
        """Look for what was committed late, or has become due, below what was read already."""
        if not self._keyless_after:
            return []
        self._keyless_after = 0
        self._send("plan_by_index", keep=False)
        self._send("fetch_keyless", after=0, limit=limit)
        names, values = self._defaults
        self._send("plan_as_before", keep=False, names=names, values=values)
        return self._wire.drain()[-1].rows()

    def _keyless(self, rows: list[tuple[Any, ...]]) -> list[Delivery]:
        if rows:
            self._keyless_after = max(self._keyless_after, rows[0][2] - 1)
        return [self._delivery(row, b"") for row in rows]

    def _sessions(
        self, tokens: Result, sessions: Result, plan: ReadPlan, limit: int
    ) -> list[Delivery]:
        rows = sessions.rows()
        keys = plan.keys
        counts = Counter(row[0] for row in rows)
        # Those behind the last one were not reached, when the limit ended the reading; should the
        # server have read them in another order, nothing is known of any.
        reached = len(keys)
        if len(rows) >= limit:
            places = [row[0] for row in rows]
            reached = places[-1] if places == sorted(places) else 0
        now = time.monotonic()
        drained = set()
        for which in range(1, reached + 1):
            key = keys[which - 1]
            whole = counts[which] < plan.each and not (which == reached and len(rows) >= limit)
            if whole:
                drained.add(key)
            owned = self._owned[key]
            if counts[which]:
                owned.drained = False
            elif whole:
                if not owned.drained:
                    owned.drained, owned.idle_since = True, now
                if owned.suspicion:
                    self._cleared.append(key)
        seen = [(keys[which - 1], low) for which, low in tokens.rows() if which <= reached]
        self._reading = Reading(rows, keys[:reached], seen, drained)
        return [self._delivery(row, keys[row[0] - 1]) for row in rows]

    def _read_suspects(self, results: list[Result], plan: ReadPlan) -> Fetched:
        deliveries = self._sessions(results[-3], results[-2], plan, plan.limit)
        changed = self._trust_cleared()
        return Fetched(
            deliveries=deliveries, alone=bool(deliveries), changed=changed or not deliveries
        )

    def _trust_cleared(self) -> bool:
        """Nothing is left of what was suspect in these sessions."""
        keys, self._cleared = self._cleared, []
        if keys:
            for key in keys:
                self._owned[key].suspicion = 0
            self._send_trust(keys)
            self._wire.drain()
        return bool(keys)

    def _send_trust(self, keys: list[bytes]) -> None:
        owned = [self._owned[key] for key in keys]
        self._send(
            "trust",
            keys=bytes_array(keys),
            holders=text_array([session.holder for session in owned]),
        )

    def _read_keyless_suspects(self, limit: int, size: int, through: int) -> Fetched:
        self._send("fetch_keyless", after=0, limit=min(limit, size))
        rows = self._wire.drain()[-1].rows()
        if not rows or rows[0][2] > through:
            self._trust_keyless()
            return Fetched(deliveries=[self._delivery(row, b"") for row in rows], changed=True)
        return Fetched(deliveries=[self._delivery(row, b"") for row in rows], alone=size == 1)

    def _trust_keyless(self) -> bool:
        self._send("trust_keyless", keep=True)
        return bool(self._wire.drain()[-1].count)

    def _forget_tokens_now(self) -> bool:
        """Nothing was left where these tokens point: remove them, as the holder."""
        tokens = self._reading.tokens
        self._reading = Reading([], [], [], set())
        keys = sorted({key for key, _ in tokens})
        self._send_fence(keys)
        (fence,) = self._wire.drain()[-1:]
        held = {row[0] for row in fence.rows()}
        mine = [(key, low) for key, low in tokens if key in held]
        self._send_forget(mine)
        self._wire.drain()
        return True

    def _send_fence(self, keys: list[bytes]) -> None:
        self._send(
            "fence",
            keys=bytes_array(keys),
            holders=text_array(
                [self._owned[key].holder if key in self._owned else "" for key in keys]
            ),
        )

    def _send_forget(self, tokens: list[tuple[bytes, int]]) -> None:
        self._send(
            "forget_tokens",
            keep=False,
            keys=bytes_array([key for key, _ in tokens]),
            lows=int_array([low for _, low in tokens]),
        )

    def _delivery(self, row: tuple[Any, ...], session: bytes) -> Delivery:
        (_, place, number, message_id, type_, format_, body, headers, sent_ms, expires_ms,
         attempts, errors, replay_of, state, fingerprint) = row  # fmt: skip
        self._reads[number] = (session, place)
        return Delivery(
            number, session or None, message_id, type_, format_, body, headers, sent_ms,
            expires_ms, attempts, errors, replay_of, state, fingerprint,
            state == InboxState.HELD,
        )  # fmt: skip


def _within(deliveries: list[Delivery]) -> list[Delivery]:
    """Return as many as fit into the memory that a batch may use; at least one."""
    size = 0
    for index, delivery in enumerate(deliveries):
        size += len(delivery.body)
        if size > BATCH_BYTES_MAX and index:
            return deliveries[:index]
    return deliveries
