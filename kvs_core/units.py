"""Byte and count arithmetic shared by everyone; no parsing of whole commands, no I/O."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_INTEGER = re.compile(r"[+-]?[0-9]+")


def ceil_div(value: int, divisor: int) -> int:
    """Smallest integer not below ``value / divisor``; ``divisor`` > 0."""
    return -(-value // divisor)


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` not below ``value``."""
    return ceil_div(value, alignment) * alignment


def parse_integer(text: str, *, low: int, high: int) -> int:
    """Plain decimal integer in ``low..high``; raises ValueError saying what is allowed.

    Spaces, underscores, exponents, hexadecimal digits and unit suffixes are refused: a script that
    meant ``64M`` should hear about it rather than run with 64.
    """
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{text!r} is not a whole number; allowed: {low} to {high}")
    value = int(text)
    if not low <= value <= high:
        raise ValueError(f"{value} is out of range; allowed: {low} to {high}")
    return value
