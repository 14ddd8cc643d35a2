"""The simulator finds no violation in the real flow, and finds those that are planted."""

from dataclasses import replace

import pytest

from procession.abc import Changes
from procession.errors import SessionLost
from procession.testing.simulation import Plan, Simulation, ViolationError, crash_everywhere

SEEDS = 150


class Wrapped:
    """A lane with a fault."""

    def __init__(self, lane):
        self._lane = lane

    def __getattr__(self, name):
        return getattr(self._lane, name)


class Unfenced(Wrapped):
    """Commits whatever was taken over meanwhile, as a store without a fence would."""

    async def flush(self, changes: Changes):
        self._lane._check_worker = lambda: None
        await self._lane._store.point("flush")
        self._changes = changes
        self._lane._numbers = [self._lane._store.draw() for _ in changes.sends]

    async def commit(self):
        lane, changes = self._lane, self.__dict__.pop("_changes", None)
        lane._check_worker = lambda: None
        lane._validate = lambda changes: None
        rows = lane._subscription.rows
        if changes is not None:
            changes.removed[:] = [d for d in changes.removed if d.position in rows]
            changes.holds[:] = [h for h in changes.holds if h.take or h.delivery.position in rows]
        lane._changes = changes
        await lane.commit()


class ChecksThenInserts(Wrapped):
    """Believes its look at the inbox and has no unique key to be told otherwise."""

    def __init__(self, lane):
        super().__init__(lane)
        self._validate, lane._validate = lane._validate, self._forget_and_validate

    def _forget_and_validate(self, changes: Changes):
        for entry in changes.entries:
            if entry.expected is None:
                self._lane._subscription.inbox.pop(entry.key, None)
        self._validate(changes)


class Careless(Wrapped):
    """Sets a failed message's time to run again, and lets its session go on meanwhile."""

    async def commit(self):
        changes = self._lane._changes
        await self._lane.commit()
        for hold in changes.holds if changes else ():
            row = self._lane._subscription.rows[hold.delivery.position]
            self._lane._subscription.sessions.pop(row.session, None)
            row.session = b"\x00elsewhere"
            row.due_ms = self._lane._store.clock.wall_ms() + hold.after_ms


class TellsTwice(Wrapped):
    """Publishes what a transaction sent although the transaction fails."""

    async def flush(self, changes: Changes):
        for message in changes.sends:
            self._lane._store.put(message, self._lane._store.draw())
        await self._lane.flush(changes)


@pytest.mark.parametrize("broker", [False, True], ids=["table", "broker"])
def test_no_schedule_of_crashes_and_pauses_breaks_a_promise(broker):
    for seed in range(SEEDS):
        Simulation(seed, Plan(broker=broker)).run()


@pytest.mark.parametrize("broker", [False, True], ids=["table", "broker"])
def test_competing_copies_without_a_session_take_effect_once(broker):
    plan = Plan(broker=broker, keyless=0.9, duplicates=0.9, workers=3)
    for seed in range(SEEDS):
        Simulation(seed, plan).run()


@pytest.mark.parametrize("broker", [False, True], ids=["table", "broker"])
@pytest.mark.parametrize("kind", ["plain", "failing", "poison", "rejected"])
def test_a_crash_at_every_await_of_one_message_breaks_nothing(broker, kind):
    calm = Plan(
        messages=1, sessions=1, keyless=0, failing=0, poison=0, rejected=0, duplicates=1,
        broker=broker,
    )  # fmt: skip
    plan = calm if kind == "plain" else replace(calm, **{kind: 1.0})
    assert crash_everywhere(plan) > 40


def test_one_seed_repeats_exactly():
    first, second = Simulation(11), Simulation(11)
    assert first.run() == second.run()
    assert first.trace == second.trace


@pytest.mark.parametrize(
    ("fault", "plan", "promise"),
    [
        (Unfenced, Plan(pause=0.05), "G1 effect once"),
        (
            ChecksThenInserts,
            Plan(broker=True, keyless=0.9, duplicates=0.9, workers=3),
            "G1 effect once",
        ),
        (Careless, Plan(failing=0.5, keyless=0), "G2 order"),
        (TellsTwice, Plan(failing=0.5), "G4 consistent output"),
    ],
)
def test_a_planted_fault_is_found(fault, plan, promise):
    found = set()
    for seed in range(SEEDS * 2):
        try:
            Simulation(seed, plan, wrap_lane=fault).run()
        except ViolationError as error:
            found.add(str(error))
        except (KeyError, SessionLost, RuntimeError):
            continue  # the fault broke the world itself
        if any(promise in text for text in found):
            return
    pytest.fail(f"{SEEDS * 2} seeds did not find {fault.__name__}: {found or 'nothing'}")


def test_a_violation_names_its_seed_and_what_led_to_it():
    for seed in range(SEEDS):
        try:
            Simulation(seed, Plan(pause=0.05), wrap_lane=Unfenced).run()
        except ViolationError as error:
            text = str(error)
            break
        except (KeyError, SessionLost, RuntimeError):
            continue
    else:
        pytest.fail("nothing was found")
    assert f"seed {seed}," in text
    assert "The last steps:" in text
