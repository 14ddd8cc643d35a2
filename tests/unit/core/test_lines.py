"""The lines in hand, against a naive model: a list for each session."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from procession.core.lines import Lines
from procession.message import Delivery

SESSIONS = st.sampled_from([b"a", b"b", b"c", None])


def delivery(position, session):
    return Delivery(position, session, b"m%d" % position, "", 0, b"", None, 0)


class LinesAgainstLists(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.lines = Lines()
        self.model = {}
        self.position = 0
        self.closed = set()

    def everything(self):
        return [found for line in self.model.values() for found in line]

    @rule(sessions=st.lists(SESSIONS, max_size=6))
    def add(self, sessions):
        added = []
        for session in sessions:
            self.position += 1
            added.append(delivery(self.position, session))
            line = session if session is not None else self.position
            self.model.setdefault(line, []).append(added[-1])
        self.lines.add(added)

    @rule(limit=st.integers(1, 8), put_back=st.booleans())
    def take(self, limit, put_back):
        taken = self.lines.take(limit, may_run=lambda session: session not in self.closed)
        open_ones = [f for f in self.everything() if f.session not in self.closed]
        assert len(taken) <= limit
        assert bool(taken) == bool(open_ones)
        for found in taken:
            line = found.session if found.session is not None else found.position
            assert self.model[line][0] is found, "not the head of its line"
            del self.model[line][0]
            if not self.model[line]:
                del self.model[line]
        if put_back:
            self.lines.put_back(taken)
            for found in reversed(taken):
                line = found.session if found.session is not None else found.position
                self.model.setdefault(line, []).insert(0, found)

    @rule(session=st.sampled_from([b"a", b"b", b"c"]))
    def drop(self, session):
        assert self.lines.drop(session) == self.model.pop(session, [])

    @rule(session=st.sampled_from([b"a", b"b", b"c"]))
    def toggle(self, session):
        self.closed ^= {session}

    @invariant()
    def same_size_and_sessions(self):
        assert len(self.lines) == len(self.everything())
        assert set(self.lines.sessions()) == {k for k in self.model if isinstance(k, bytes)}


TestLines = LinesAgainstLists.TestCase
TestLines.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(long=st.integers(50, 200), quiet=st.integers(1, 5), limit=st.integers(6, 20))
def test_a_hot_session_never_keeps_a_quiet_one_out_of_a_batch(long, quiet, limit):
    lines = Lines()
    lines.add([delivery(number, b"hot") for number in range(long)])
    lines.add([delivery(1_000 + number, b"quiet%d" % number) for number in range(quiet)])
    taken = lines.take(limit, may_run=lambda _: True)
    assert {found.session for found in taken} >= {b"quiet%d" % number for number in range(quiet)}


def test_what_is_empty_leaves_nothing_behind():
    lines = Lines()
    for number in range(10_000):
        lines.add([delivery(number, b"session-%d" % number)])
        lines.take(1, may_run=lambda _: True)
    assert (len(lines), lines.sessions(), lines._lines) == (0, [], {})


def test_clear_takes_everything():
    lines = Lines()
    lines.add([delivery(1, b"a"), delivery(2, None)])
    assert {found.position for found in lines.clear()} == {1, 2}
    assert len(lines) == 0
