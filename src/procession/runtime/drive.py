"""Drives a coroutine that never suspends: the way in which blocking stores run the async flows."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


def drive(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end in one step, without an event loop (about 1 µs).

    Raises:
        RuntimeError: it suspended: something in it awaits for real and needs a loop.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking flow suspended: it awaits something that needs an event loop")
