"""Every limit and default, in one place, checked when it is made. Does nothing by itself.

Durations are in milliseconds and say so in their names. `docs/defaults.md` gives the reason of
each default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from procession.errors import ConfigurationError

ATTEMPTS_LIMIT = 1_000
ENVIRONMENT_PREFIX = "PROCESSION_"
# Variables of the same prefix that mean something else: the command line's target, the store, and
# where health and metrics are served.
NOT_SETTINGS = frozenset(
    {"app", "store", "health_port", "health_host", "metrics_port", "metrics_host"}
)


def refuse(faults: Iterable[str], what: str) -> None:
    """Raise one `ConfigurationError` that names all faults; do nothing where there are none."""
    found = list(faults)
    if found:
        raise ConfigurationError(f"{what}: " + "; ".join(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a failed message runs again, alone.

    Attributes:
        max_attempts: lone runs before the message becomes a dead letter. Defaults to 5.
        first_ms: wait after the first failed lone run. Defaults to 1,000.
        factor: each wait is this many times the one before. Defaults to 3.
        longest_ms: no wait is longer. Defaults to 300,000 (5 minutes).
        jitter: share of the wait that is drawn at random, 0 to 1. Defaults to 0.2.
    """

    max_attempts: int = 5
    first_ms: int = 1_000
    factor: float = 3.0
    longest_ms: int = 300_000
    jitter: float = 0.2

    def __post_init__(self) -> None:
        faults = []
        if not 1 <= self.max_attempts <= ATTEMPTS_LIMIT:
            faults.append(f"max_attempts is {self.max_attempts}, must be 1 to 1,000")
        if self.first_ms < 0 or self.longest_ms < self.first_ms:
            faults.append("0 <= first_ms <= longest_ms must hold")
        if not 1 <= self.factor < math.inf:
            faults.append(f"factor is {self.factor}, must be at least 1, and finite")
        if not 0 <= self.jitter <= 1:
            faults.append(f"jitter is {self.jitter}, must be 0 to 1")
        refuse(faults, "RetryPolicy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of an app. Each relation between them is checked here, all faults at once.

    Attributes:
        lease_ms: a worker that has not renewed for this long may be taken over. Default 30,000.
        renew_ms: how often it renews; at most half of the lease. Default: a third of the lease.
        handler_limit_ms: a handler that runs longer loses its connection. Default 20,000.
        batch_max: messages in one transaction. Default 500.
        batch_budget_ms: handler time after which a batch commits what ran. Default 50.
        suspect_batch: batch size after a worker vanished. Default 16.
        sessions_max: sessions that one lane owns at a time. Default 256.
        idle_ms: pause between two looks at an idle queue. Default 10.
        busy_ms: how long to wait for a locked database before receiving pauses. Default 5,000.
        pause_ms: first pause after the store failed; doubles up to pause_longest_ms. Default 100.
        pause_longest_ms: Default 5,000.
        stop_ms: how long a graceful stop waits for the running batch. Default 25,000.
        abandoned_max: hung handler threads before the process replaces itself. Default 3.
        payload_max: bytes of one message body. Default 16 MiB.
        error_chars_max: characters kept of one error text. Default 2,000.
        retention_ms: how long a dedup key is remembered. Default 7 days.
        prune_every_ms: pause between two walks that forget old keys. Default 60,000.
        resend_horizon_ms: how late a producer may send a message again. Default 7 days.
    """

    lease_ms: int = 30_000
    renew_ms: int = 0
    handler_limit_ms: int = 20_000
    batch_max: int = 500
    batch_budget_ms: int = 50
    suspect_batch: int = 16
    sessions_max: int = 256
    idle_ms: int = 10
    busy_ms: int = 5_000
    pause_ms: int = 100
    pause_longest_ms: int = 5_000
    stop_ms: int = 25_000
    abandoned_max: int = 3
    payload_max: int = 16 * 1024 * 1024
    error_chars_max: int = 2_000
    retention_ms: int = 7 * 24 * 3_600_000
    prune_every_ms: int = 60_000
    resend_horizon_ms: int = 7 * 24 * 3_600_000

    @staticmethod
    def from_environment(environment: Mapping[str, str] | None = None) -> Settings:
        """Return settings with what `PROCESSION_<FIELD>` variables say, such as
        `PROCESSION_LEASE_MS=10000`; the rest have their defaults.

        Args:
            environment: instead of the process's own.

        Raises:
            ConfigurationError: a value is no whole number, a variable is no setting, or settings
                contradict each other; all faults at once.

        Example:
            >>> Settings.from_environment({"PROCESSION_BATCH_MAX": "100"}).batch_max
            100
        """
        found = os.environ if environment is None else environment
        known = {field.name for field in fields(Settings)}
        values: dict[str, int] = {}
        faults = []
        for variable, text in sorted(found.items()):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if not variable.startswith(ENVIRONMENT_PREFIX) or name in NOT_SETTINGS:
                continue
            if name not in known:
                faults.append(f"{variable} is no setting (they are: {', '.join(sorted(known))})")
            elif not text.strip().isdigit():
                faults.append(f"{variable}={text!r} is no whole number")
            else:
                values[name] = int(text)
        try:
            settings = Settings(**values)
        except ConfigurationError as error:
            raise ConfigurationError("; ".join([*faults, str(error)])) from None
        refuse(faults, "environment")
        return settings

    def __post_init__(self) -> None:
        refuse(
            (
                f"{field.name} is {getattr(self, field.name)!r}, must be a whole number"
                for field in fields(self)
                if type(getattr(self, field.name)) is not int
            ),
            "Settings",
        )
        if self.renew_ms == 0:
            object.__setattr__(self, "renew_ms", self.lease_ms // 3)
        faults = [
            f"{field.name} is {getattr(self, field.name)}, must be at least 1"
            for field in fields(self)
            if getattr(self, field.name) < 1
        ]
        if self.renew_ms * 2 > self.lease_ms:
            faults.append(
                f"renew_ms ({self.renew_ms}) must be at most half of lease_ms ({self.lease_ms}), "
                "or one slow renewal loses the lease"
            )
        if self.batch_budget_ms > self.lease_ms:
            faults.append("batch_budget_ms must be below lease_ms")
        if self.suspect_batch > self.batch_max:
            faults.append("suspect_batch must be at most batch_max")
        if self.pause_longest_ms < self.pause_ms:
            faults.append("pause_longest_ms must be at least pause_ms")
        if self.retention_ms < self.resend_horizon_ms:
            faults.append(
                f"retention_ms ({self.retention_ms}) must be at least resend_horizon_ms "
                f"({self.resend_horizon_ms}): a key forgotten earlier lets a resend run twice"
            )
        refuse(faults, "Settings")
