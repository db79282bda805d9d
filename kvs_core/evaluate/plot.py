"""A picture of a comparison: divergence by position, and how it is distributed. Needs the extra ``plot``.

matplotlib is imported when a picture is drawn, never with the package. Backends are not touched: a bare Figure writes
files without a display.
"""

from __future__ import annotations

import importlib.util
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import ConfigError
from kvs_core.evaluate.kl_divergence import KldResult
from kvs_core.evaluate.partial_file import PartialFile

PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_N_POSITION_BINS = 256
_N_HISTOGRAM_BINS = 60


def check_plot_path(path: Path) -> None:
    """Refuse, before anything is computed, a picture that could not be drawn at the end. Raises ConfigError."""
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {path}: the name must end in {', '.join(PLOT_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed", hint="pip install matplotlib")


def plot_divergence(result: KldResult, path: Path, *, title: str) -> None:
    """Write the picture; its type follows the suffix. Raises FileAccessError when the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    by_position, histogram = figure.subplots(2, 1)
    kld = np.asarray(result.rows["kld"], np.float64)

    bins = bin_by_position(kld.reshape(-1, result.plan.rows_per_chunk), result.plan.first)
    by_position.plot(bins.positions, bins.largest, linewidth=0.7, label="largest")
    by_position.plot(bins.positions, bins.mean, linewidth=1.2, label="mean")
    if kld.max(initial=0.0) > 0.0:
        by_position.set_yscale("log", nonpositive="mask")
    by_position.set_xlabel("position in the context (tokens)")
    by_position.set_ylabel("KL divergence (nats)")
    by_position.set_title(title)
    by_position.legend()

    positive = kld[kld > 0.0]
    if len(positive):
        histogram.hist(np.log10(positive), bins=_N_HISTOGRAM_BINS)
    histogram.set_xlabel(f"log10 of the KL divergence; {len(kld) - len(positive)} of {len(kld)} rows are at or below 0")
    histogram.set_ylabel("rows")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120, format=path.suffix[1:].lower())
    with PartialFile(path, keeps=False) as file:
        file.truncate(0)
        file.write(drawn.getbuffer())
        file.publish()


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBins:
    """Rows of all chunks gathered by position: float64 [n_bins] each."""

    positions: NDArray[np.float64]
    mean: NDArray[np.float64]
    largest: NDArray[np.float64]


def bin_by_position(kld: NDArray[np.float64], first: int) -> PositionBins:
    """At most ``_N_POSITION_BINS`` bins over the scored positions; ``kld`` float64 [n_chunk, rows_per_chunk]."""
    n_rows = kld.shape[1]
    starts = np.unique(np.linspace(0, n_rows, min(n_rows, _N_POSITION_BINS), endpoint=False).astype(np.int64))
    sizes = np.diff(np.append(starts, n_rows))
    return PositionBins(
        positions=first + starts + (sizes - 1) / 2,
        mean=np.add.reduceat(kld.mean(axis=0), starts) / sizes,
        largest=np.maximum.reduceat(kld.max(axis=0), starts),
    )
