"""How the demo speaks while it runs: sentences with a time, and a progress bar on a terminal.

What is no terminal gets plain lines, with the progress as one of them at each tenth.
"""

import time
from types import TracebackType
from typing import IO, Final, NoReturn, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

_LINES_UP_TO_PERCENT: Final = 10


class _Console(Console):
    """A console that tells its caller when nobody reads any more, instead of ending the process."""

    def on_broken_pipe(self) -> NoReturn:
        raise BrokenPipeError


class Voice:
    """Speaks to one stream. A context manager: the bar is gone when it ends."""

    def __init__(self, stream: IO[str]) -> None:
        self.console = _Console(file=stream, highlight=False, markup=False, emoji=False)
        self._stream = stream
        self._began_s = time.monotonic()
        self._told_percent = 0
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                console=self.console,
                transient=True,
                expand=True,
            )
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def explain(self, text: str) -> None:
        """Begin something new: its progress starts from nothing."""
        if self._progress is not None:
            for task in self._tasks.values():
                self._progress.remove_task(task)
        self._tasks.clear()
        self._told_percent = 0
        self._print("")
        self._print(text)

    def say(self, text: str) -> None:
        """Say what has just happened."""
        self._print(f"{time.monotonic() - self._began_s:5.1f} s  {text}")

    def show(self, stages: dict[str, tuple[int, int]]) -> None:
        """Show how far each stage is: how many of how many."""
        if self._progress is not None:
            for name, (done, total) in stages.items():
                if name not in self._tasks:
                    self._tasks[name] = self._progress.add_task(name, total=total)
                self._progress.update(self._tasks[name], completed=done, total=total)
            return
        done = sum(each for each, _ in stages.values())
        total = sum(each for _, each in stages.values())
        percent = done * 100 // max(1, total)
        if percent >= self._told_percent + _LINES_UP_TO_PERCENT:
            self._told_percent = percent - percent % _LINES_UP_TO_PERCENT
            parts = ", ".join(
                f"{name} {part:,} of {all_:,}" for name, (part, all_) in stages.items()
            )
            self.say(f"{self._told_percent} %: {parts}")

    def _print(self, text: str) -> None:
        if self.console.is_terminal:
            self.console.print(text)
        else:
            # As it is: who reads a pipe line by line wants no line of a terminal's width.
            print(text, file=self._stream, flush=True)
