"""Launchers of small steps on rows refuse what their kernels do not take, before anything reaches a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.add_normed import add_normed, add_normed_pair
from cuda_kernels.head_norms import Heads, norm_heads
from cuda_kernels.norm import norm_first, rms_norm
from cuda_kernels.scaling import scale_in_place, softcap, softplus_gate, take_columns
from kvs_core.errors import KernelArgumentError
from tests.cuda.test_launchers import DeviceStub

ROWS, ODD, VECTOR, ONE = DeviceStub((3, 64)), DeviceStub((3, 62)), DeviceStub((64,)), DeviceStub((1,))
HALVES = DeviceStub((3, 64), np.float16)

CASES: dict[str, tuple[Callable[..., None], str]] = {
    "add normed, weight": (partial(add_normed, ROWS, DeviceStub((63,)), ROWS, eps=1e-6), "weight"),
    "add normed, residual": (partial(add_normed, ROWS, VECTOR, ODD, eps=1e-6), "rows"),
    "add normed, columns": (partial(add_normed, ODD, DeviceStub((62,)), ODD, eps=1e-6), "62 columns"),
    "add normed, scale": (partial(add_normed, ROWS, VECTOR, ROWS, scale=VECTOR, eps=1e-6), "scale"),
    "add normed, eps": (partial(add_normed, ROWS, VECTOR, ROWS, eps=0.0), "eps"),
    "pair, second": (partial(add_normed_pair, ROWS, ODD, [VECTOR] * 3, ROWS, eps=1e-6), "rows"),
    "pair, weight": (partial(add_normed_pair, ROWS, ROWS, [VECTOR, ONE, VECTOR], ROWS, eps=1e-6), "weight"),
    "heads, sizes": (partial(norm_heads, [Heads(x=ROWS, weight=None), Heads(x=ODD, weight=None)], eps=1e-6), "heads 1"),
    "heads, weight": (partial(norm_heads, [Heads(x=ROWS, weight=ONE)], eps=1e-6), "weight 0"),
    "heads, none": (partial(norm_heads, [], eps=1e-6), "0 arrays"),
    "heads, four": (partial(norm_heads, [Heads(x=ROWS, weight=None)] * 4, eps=1e-6), "4 arrays"),
    "heads, columns": (partial(norm_heads, [Heads(x=ODD, weight=None)], eps=1e-6), "heads of 62"),
    "heads, eps": (partial(norm_heads, [Heads(x=ROWS, weight=None)], eps=0.0), "eps"),
    "norm, halves": (partial(rms_norm, ROWS, None, ROWS, half=ROWS, eps=1e-6), "half"),
    "norm first, longer": (partial(norm_first, ROWS, DeviceStub((65,)), eps=1e-6), "65 elements"),
    "norm first, eps": (partial(norm_first, ROWS, ONE, eps=0.0), "eps"),
    "scale, type": (partial(scale_in_place, DeviceStub((64,), np.float16), 2.0), "float16"),
    "softcap, cap": (partial(softcap, VECTOR, 0.0), "softcap 0.0"),
    "softcap, rows": (partial(softcap, ROWS, 1.0), "x"),
    "softplus, gates": (partial(softplus_gate, DeviceStub((3, 5)), ROWS), "5 gates"),
    "softplus, rows": (partial(softplus_gate, DeviceStub((2, 4)), ROWS), "gate"),
    "columns, beyond": (partial(take_columns, ROWS, 33, DeviceStub((3, 32))), "32 columns from 33"),
    "columns, before": (partial(take_columns, ROWS, -1, DeviceStub((3, 32))), "32 columns from -1"),
    "columns, type": (partial(take_columns, ROWS, 0, HALVES), "out"),
}


@pytest.mark.parametrize("case", CASES)
def test_rows_that_a_kernel_does_not_take_are_refused(case: str) -> None:
    launch, reason = CASES[case]
    with pytest.raises(KernelArgumentError, match=reason):
        launch(stream=0)


@pytest.mark.parametrize("vector", ["bias", "scales"])
def test_routing_refuses_vectors_of_another_number_of_experts(vector: str) -> None:
    from cuda_kernels.routing import RoutingRule, route

    choice: tuple[Any, ...] = (DeviceStub((3, 8)), DeviceStub((3, 2), np.int32), DeviceStub((3, 2)))
    with pytest.raises(KernelArgumentError, match=vector):
        route(*choice, rule=RoutingRule(), **{vector: DeviceStub((7,))}, stream=0)
