"""Who does not ask for another package does not need it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import procession.contrib
from procession import App, ConfigurationError
from procession.cli import metrics

OTHERS = ("opentelemetry", "prometheus_client", "structlog", "typer", "rich", "yaml")


def test_importing_the_framework_imports_no_other_package():
    code = (
        "import sys, procession, procession.app, procession.testing, procession.contrib, "
        "procession.contrib.metrics, procession.cli.worker\n"
        f"print([name for name in {OTHERS!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_missing_client_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "procession.contrib.prometheus", None)
    monkeypatch.delattr(procession.contrib, "prometheus", raising=False)
    with pytest.raises(ConfigurationError, match=r"pip install 'procession\[prometheus\]'"):
        metrics.count(App("t", store="memory://"))
