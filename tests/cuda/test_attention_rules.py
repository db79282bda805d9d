"""Soft caps and sinks of CUDA attention carried out by numpy, and what launchers refuse of them; no device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.attention_common import LOG2_E, cap_scores
from cuda_kernels.attention_prefill import attention_prefill, count_state_floats
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.prefill_tiles import PrefillFragments
from kvs_core.cuda_scratch import LARGE_BEGIN
from kvs_core.errors import KernelArgumentError
from tests.cuda.numpy_emitter import LANES, NumpyEmitter
from tests.cuda.test_launchers import PAGE, STREAM, DeviceStub, decode_arguments

RATIO = 6


def fragments(n_row_tiles: int) -> PrefillFragments:
    return PrefillFragments(64, 64, n_row_tiles, 16, gqa_ratio=RATIO, softcap=0.0)


@pytest.mark.parametrize("softcap", [1.5, 30.0, 50.0])
def test_capped_scores_are_exact_to_some_places_of_the_cap(softcap: float) -> None:
    emit = NumpyEmitter(np.zeros(0, np.uint8))
    scale_log2 = np.full(32, 0.125 * LOG2_E, np.float32)
    for size in (0.01, 1.0, 30.0, 4000.0, 1e20):
        products = np.linspace(-size, size, 32, dtype=np.float32)
        (capped,) = cap_scores(emit, [products], scale_log2, softcap)
        exact = softcap * np.tanh(0.125 * products.astype(np.float64) / softcap) * LOG2_E
        assert capped.dtype == np.float32
        np.testing.assert_allclose(capped, exact, rtol=0, atol=8 * np.spacing(np.float32(softcap * LOG2_E)))


@pytest.mark.parametrize("n_row_tiles", [1, 2])
def test_every_row_takes_the_sink_of_its_head(n_row_tiles: int) -> None:
    sinks = np.random.default_rng(1).standard_normal(4 * RATIO).astype(np.float32)
    emit = NumpyEmitter(sinks.view(np.uint8).copy())
    row = (40 + LANES // 4).astype(np.uint32)
    loaded = fragments(n_row_tiles)._load_sinks(emit, np.zeros(32, np.int64), emit.word(2 * RATIO), row)
    for half, values in enumerate(loaded):
        np.testing.assert_array_equal(values, sinks[2 * RATIO + (row + 8 * half) % RATIO])
    assert len(loaded) == 2 * n_row_tiles


@pytest.mark.parametrize("sink", [-200.0, -1.0, 0.5, 9.0, 300.0])
def test_a_sink_joins_the_sum_and_brings_no_value(sink: float) -> None:
    rng = np.random.default_rng(2)
    tiles, emit = fragments(1), NumpyEmitter(np.zeros(0, np.uint8))
    scale_log2 = np.full(32, 0.125 * LOG2_E, np.float32)
    of_rows = np.repeat(rng.uniform(-50, 50, (2, 8)), 4, axis=1).astype(np.float32)  # the four lanes of a row agree
    shares = rng.uniform(0.1, 4, (2, 32)).astype(np.float32)
    sums = list(rng.standard_normal((tiles.n_sums, 32)).astype(np.float32))
    sinks = np.full((2, 32), sink, np.float32)

    out = tiles._normalise_with(emit, sums, [*of_rows, *shares], list(sinks), scale_log2)
    for i, values in enumerate(out):
        row = tiles._row_of(i, tiles.n_value_columns)
        total = np.repeat(shares[row].astype(np.float64).reshape(8, 4).sum(axis=1), 4)
        with np.errstate(over="ignore"):
            exact = sums[i] / (total + np.exp(sink - 0.125 * of_rows[row].astype(np.float64)))
        np.testing.assert_allclose(values, exact, rtol=3e-5, atol=1e-30)


def test_sinks_are_one_for_each_head() -> None:
    sinks = DeviceStub((2,))
    arguments = decode_arguments()
    with pytest.raises(KernelArgumentError, match="sinks: shape"):
        merge_partials(
            arguments["partials"],
            arguments["max_sum"],
            arguments["positions"],
            DeviceStub((state_floats(8, 64),)),
            DeviceStub((1, 8, 64)),
            n_head=8,
            head_dim=64,
            first_partition=0,
            large_begin=LARGE_BEGIN,
            is_first=True,
            is_last=True,
            sinks=sinks,
            stream=STREAM,
        )
    prompt: dict[str, Any] = {"key_begin": 0, "key_end": 100, "is_first": True, "is_last": True, "scale": 0.125}
    state = DeviceStub((count_state_floats(PAGE, 100, 4),))
    rows = DeviceStub((100, 8, 64))
    with pytest.raises(KernelArgumentError, match="sinks: shape"):
        attention_prefill(
            rows,
            DeviceStub((1,), np.int64),
            state,
            rows,
            page=PAGE,
            first_position=0,
            sinks=sinks,
            kernel_name="mma",
            stream=STREAM,
            **prompt,
        )
