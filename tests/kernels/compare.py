"""Judging float32 results against float64, in units of what plain float32 arithmetic does to the same inputs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def assert_as_good_as_plain(
    result: NDArray[np.float32],
    exact: NDArray[np.floating],
    plain: NDArray[np.floating],
    *,
    times: float,
) -> None:
    """The worst error is at most ``times`` the worst error of ``plain``, and nothing is missing."""
    error = np.abs(result - exact)
    allowed = times * np.abs(plain - exact).max() + np.spacing(np.abs(exact).max().astype(np.float32))
    worst = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
    n_wrong = int((~(error <= allowed)).sum())
    assert n_wrong == 0, (
        f"{n_wrong} of {error.size} off by over {allowed:g}; worst at {worst}: {result[worst]} {exact[worst]}"
    )
