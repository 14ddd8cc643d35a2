"""Settings and the store from the environment; every fault at once."""

import pytest

from procession import App, Settings
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
