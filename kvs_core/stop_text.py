"""Finding stop strings in streamed text before any part of one is shown.

Ending a generation by token id is the caller's; this looks at text only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Passes text on until a stop string appears; holds back an ending that could still become one.

    The stop string that is complete first ends the stream (of two that end together, the longer one). Neither it nor
    anything behind it is returned. The results, joined, do not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ConfigError for an empty stop string, which would match everywhere."""
        if "" in stops:
            raise ConfigError(
                [Problem(field="--reverse-prompt", value="''", reason="a stop string needs at least one character")]
            )
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        """Add text; what can be shown of everything so far. After a stop nothing is returned any more."""
        if self._stopped:
            return StopResult(text="")
        self._held += text
        complete = [(begin + len(stop), begin, stop) for stop in self._stops if (begin := self._held.find(stop)) >= 0]
        if complete:
            _, begin, stop = min(complete)
            shown, self._held, self._stopped = self._held[:begin], "", True
            return StopResult(text=shown, stop=stop)
        keep = self._open_length()
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return StopResult(text=shown)

    def flush(self) -> str:
        """End the stream: the ending that was held back and turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _open_length(self) -> int:
        """Length of the longest ending of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            ending = self._held[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0
