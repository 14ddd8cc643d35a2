"""Many more seeds than a developer's loop has time for."""

import pytest

from procession.testing.simulation import Plan, Simulation

PLANS = [
    Plan(),
    Plan(broker=True),
    Plan(messages=40, sessions=5, workers=4, crash=0.02, pause=0.02),
    Plan(messages=40, sessions=5, workers=4, crash=0.02, pause=0.02, broker=True),
    Plan(keyless=0.9, duplicates=0.9, workers=3, broker=True),
    Plan(failing=0.5, poison=0.2, rejected=0.1),
    Plan(failing=0.5, poison=0.2, rejected=0.1, broker=True),
]


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_ten_thousand_seeds_break_no_promise(plan):
    for seed in range(10_000):
        Simulation(seed, plan).run()
