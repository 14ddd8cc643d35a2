"""Settings and the store from the environment; every fault at once."""

import math

import pytest

from procession import App, RetryPolicy, Settings
from procession.errors import ConfigurationError


def test_variables_override_defaults_and_nothing_else():
    found = Settings.from_environment(
        {"PROCESSION_LEASE_MS": "9000", "PROCESSION_APP": "a:b", "PATH": "/bin"}
    )
    assert found == Settings(lease_ms=9_000)


def test_every_fault_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Settings.from_environment(
            {
                "PROCESSION_LEESE_MS": "1",
                "PROCESSION_BATCH_MAX": "many",
                "PROCESSION_RENEW_MS": "30000",
                "PROCESSION_SUSPECT_BATCH": "1000",
            }
        )
    for word in ("PROCESSION_LEESE_MS", "'many'", "renew_ms", "suspect_batch"):
        assert word in str(caught.value)


def test_an_app_takes_both_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PROCESSION_STORE", f"sqlite:///{tmp_path}/e.db")
    monkeypatch.setenv("PROCESSION_BATCH_MAX", "7")
    monkeypatch.setenv("PROCESSION_SUSPECT_BATCH", "7")
    app = App("t")
    assert app.database == tmp_path / "e.db"
    assert app.settings.batch_max == 7


def test_an_app_without_a_store_says_what_to_do(monkeypatch):
    monkeypatch.delenv("PROCESSION_STORE", raising=False)
    with pytest.raises(ConfigurationError, match="PROCESSION_STORE"):
        App("t")


def test_every_contradiction_of_settings_in_code_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Settings(
            lease_ms=100,
            renew_ms=80,
            batch_budget_ms=200,
            batch_max=10,
            suspect_batch=20,
            pause_ms=50,
            pause_longest_ms=20,
            retention_ms=5,
            resend_horizon_ms=6,
            idle_ms=0,
        )
    for words in (
        "idle_ms is 0, must be at least 1",
        "renew_ms (80) must be at most half of lease_ms (100)",
        "batch_budget_ms must be below lease_ms",
        "suspect_batch must be at most batch_max",
        "pause_longest_ms must be at least pause_ms",
        "retention_ms (5) must be at least resend_horizon_ms (6)",
    ):
        assert words in str(caught.value)


def test_settings_are_whole_numbers():
    with pytest.raises(ConfigurationError, match=r"lease_ms is '10'.*idle_ms is 0.5"):
        Settings(lease_ms="10", idle_ms=0.5)  # type: ignore[arg-type]


def test_every_contradiction_of_a_retry_policy_is_told_at_once():
    with pytest.raises(ConfigurationError) as caught:
        RetryPolicy(max_attempts=0, first_ms=9, longest_ms=1, factor=math.nan, jitter=2)
    for word in ("max_attempts", "first_ms <= longest_ms", "factor is nan", "jitter"):
        assert word in str(caught.value)


def test_where_probes_and_scrapers_ask_is_no_setting():
    places = {"PROCESSION_HEALTH_PORT": "1", "PROCESSION_METRICS_HOST": "0.0.0.0"}
    assert Settings.from_environment(places) == Settings()
