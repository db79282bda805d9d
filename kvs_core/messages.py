"""Text that came from a file or a user, made safe for one line of a message; no messages themselves."""

from __future__ import annotations

LONGEST_SHOWN = 400
"""Characters of one value a message shows; a 5000-character path would push the reason off every screen."""


def show_text(text: str, limit: int = LONGEST_SHOWN) -> str:
    """``text`` on one line: control characters and undecodable bytes escaped, the middle of a long text left out."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    if len(shown) <= limit:
        return shown
    kept = limit // 2
    return f"{shown[:kept]}…({len(shown) - 2 * kept} more characters)…{shown[-kept:]}"
