"""What tests need: an app in process, a simulator, checkers, and conformance suites for adapters.
Nothing here runs in production."""

from procession.testing.run import TestRun, run
from procession.testing.simulate import Faults, ViolationError, simulate

__all__ = ["Faults", "TestRun", "ViolationError", "run", "simulate"]
