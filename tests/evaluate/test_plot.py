"""Pictures of a comparison."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvs_core.errors import ConfigError
from kvs_core.evaluate import plot
from kvs_core.evaluate.chunks import plan_saved_chunks
from kvs_core.evaluate.kl_divergence import KldResult
from kvs_core.evaluate.plot import bin_by_position, check_plot_path, plot_divergence
from tests.evaluate.test_kld_statistics import random_rows

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def make_result(*, identical: bool = False) -> KldResult:
    plan = plan_saved_chunks(n_ctx=64, n_present=3)
    rows = random_rows(plan.n_rows)
    if identical:
        rows["kld"] = 0.0
    return KldResult(
        plan=plan,
        rows=rows,
        non_finite=None,
        kld_floor=0.0,
        is_base_exact=True,
        products=np.float64,
        base_streaming=None,
        streaming=None,
    )


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs the extra plot")
@pytest.mark.parametrize("suffix", [".png", ".svg"])
@pytest.mark.parametrize("identical", [False, True])
def test_a_picture_is_written(tmp_path: Path, suffix: str, identical: bool) -> None:
    path = tmp_path / f"out{suffix}"
    check_plot_path(path)
    plot_divergence(make_result(identical=identical), path, title="f16 against q8_0")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in data


def test_a_picture_that_cannot_be_drawn_is_refused_up_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.png"):
        check_plot_path(tmp_path / "out.bmp")
    with pytest.raises(ConfigError, match="there is no folder"):
        check_plot_path(tmp_path / "absent" / "out.png")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs matplotlib") as caught:
        check_plot_path(tmp_path / "out.png")
    assert caught.value.hint == "pip install matplotlib"


@pytest.mark.parametrize("n_rows", [1, 31, 256, 4095])
def test_bins_cover_every_position_once(n_rows: int) -> None:
    kld = np.random.default_rng(0).gamma(1.0, 1.0, (2, n_rows))
    bins = bin_by_position(kld, 10)
    sizes = np.diff(np.append(2 * (bins.positions - bins.positions[0]), 0))[:-1]
    assert (sizes > 0).all()
    assert bins.largest.max() == kld.max()
    assert bins.positions[0] >= 10
    assert bins.positions[-1] <= 10 + n_rows - 1
    if n_rows <= 256:
        assert bins.mean == pytest.approx(kld.mean(axis=0))


def test_importing_the_evaluation_does_not_import_matplotlib() -> None:
    code = "import kvs_core.evaluate.plot, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
