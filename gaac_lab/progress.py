"""How a run reads while it goes on: a live line on a terminal, a few plain lines in a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gaac_lab.kernel import Execution
from gaac_lab.manifest import NotebookStatus

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

HEARTBEATS_S = (60, 300, 1200, 3600, 7200)


class Progress:
    """Says what happens to each notebook. On a terminal the notebook at work has a spinner."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._name = ""
        self._width = 0
        self._beats: list[int] = []

    def begin(self, title: str, names: list[str]) -> None:
        """The run starts with these notebooks."""
        self._width = max(map(len, names), default=0)
        self.say(title)

    def start(self, name: str) -> None:
        """One notebook starts."""
        self._name, self._beats = name, list(HEARTBEATS_S)
        if self._console.is_terminal:
            self._status = self._console.status(self._line("starting"))
            self._status.start()

    def tick(self, execution: Execution) -> None:
        """It is at work. In a log, a line comes only after minutes."""
        cell = f"cell {execution.cell} of {execution.cells}" if execution.cell else "starting"
        state = f"{duration(execution.seconds)}, {cell}"
        if self._status is not None:
            self._status.update(self._line(state))
        elif self._beats and execution.seconds >= self._beats[0]:
            self._beats.pop(0)
            self.say(self._line(f"at work for {state}"))

    def end(self, name: str, state: NotebookStatus) -> None:
        """It has ended."""
        self.stop()
        self._name = name
        took = "" if state.seconds is None else f" in {duration(state.seconds)}"
        reason = f": {state.reason}" if state.reason else ""
        self.say(self._line(f"{state.status}{took}{reason}"))

    def keep(self, name: str) -> None:
        """Its earlier results still stand."""
        self._name = name
        self.say(self._line("kept: nothing that it depends on has changed"))

    def stop(self) -> None:
        """Take the live line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        """One line, as it is: no markup, no wrapping."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _line(self, text: str) -> str:
        return f"{self._name:<{self._width}} ... {text}"


def duration(seconds: float) -> str:
    """Seconds as people say them: "41 s", "3 min 05 s", "2 h 04 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
