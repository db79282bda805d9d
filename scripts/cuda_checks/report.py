"""What a check returns, and how much error it may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``error`` and ``bound`` share a unit; an exact comparison counts differing elements and has bound 0."""

    what: str
    error: float
    bound: float

    @property
    def passed(self) -> bool:
        return bool(self.error <= self.bound)  # NaN never passes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One case: a line of the table for every outcome it yields."""

    family: str
    case: str
    run: Callable[[], Iterator[Outcome]]


def row_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Largest relative error of a row, by norms over the last axis; NaN if anything is NaN."""
    difference = np.linalg.norm(got.astype(np.float64) - exact, axis=-1)
    norm = np.linalg.norm(exact, axis=-1)
    return float(np.max(difference / np.maximum(norm, 1e-30)))


def close(what: str, got: np.ndarray, exact: np.ndarray, plain: np.ndarray, *, times: float) -> Outcome:
    """``got`` may be ``times`` as far from ``exact`` as ``plain``, the same in plain arithmetic of that precision."""
    floor = 4.0 * float(np.finfo(np.float32).eps)  # a short row can be exact by luck
    return Outcome(what=what, error=row_error(got, exact), bound=times * max(row_error(plain, exact), floor))


def same_bits(what: str, got: np.ndarray, expected: np.ndarray) -> Outcome:
    """Count of elements whose bytes differ."""
    a, b = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{what}: {a.dtype}{a.shape} compared with {b.dtype}{b.shape}")
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return Outcome(what=what, error=float(np.count_nonzero(a.view(unsigned) != b.view(unsigned))), bound=0.0)
