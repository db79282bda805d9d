"""Launchers of recurrent layers refuse what their kernels do not take, before anything reaches a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from cuda_kernels.convolution import short_convolution
from cuda_kernels.delta_gates import norm_gate
from cuda_kernels.delta_net import delta_net_prompt, delta_net_step
from cuda_kernels.elementwise import sigmoid_mul, split_groups
from kvs_core.errors import KernelArgumentError
from kvs_core.recurrent_shape import RecurrentShape
from tests.cuda.test_launchers import DeviceStub

SIZES = RecurrentShape(n_head_k=2, n_head_v=4, head_dim=64, n_taps=4, groups_values=False)
STREAM = 0


def net_arguments(n_tokens: int = 3, sizes: RecurrentShape = SIZES) -> dict[str, Any]:
    return {
        "heads": DeviceStub((n_tokens, sizes.n_channels)),
        "beta": DeviceStub((n_tokens, sizes.n_head_v)),
        "decay": DeviceStub((n_tokens, sizes.n_head_v)),
        "state": DeviceStub((sizes.n_inner * sizes.head_dim,)),
        "positions": DeviceStub((n_tokens,), np.int32),
        "sizes": sizes,
        "stream": STREAM,
    }


def step_arguments(n_tokens: int = 3) -> dict[str, Any]:
    return net_arguments(n_tokens) | {
        "gates": (DeviceStub((4,)), DeviceStub((4,))),
        "weight": DeviceStub((64,)),
        "gate": DeviceStub((n_tokens, 256)),
        "quants": DeviceStub((n_tokens, 256), np.int8),
        "scales": DeviceStub((n_tokens, 16, 2)),
        "eps": 1e-6,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": np.zeros((3, 512), np.float32)}, "heads: ndarray is not in device memory"),
        ({"heads": DeviceStub((3, 511))}, r"heads: shape \[3, 511\], needs \[any, 512\]"),
        ({"beta": DeviceStub((2, 4))}, "beta: shape"),
        ({"decay": DeviceStub((3, 4), np.float64)}, "decay: dtype float64, needs float32"),
        ({"state": DeviceStub((1024,))}, "state: shape"),
        ({"positions": DeviceStub((3,), np.int64)}, "positions: dtype int64, needs int32"),
        ({"sizes": replace(SIZES, head_dim=48)}, "heads of 48 elements; a multiple of 32 needed"),
    ],
)
def test_a_delta_net_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        delta_net_prompt(**net_arguments() | {"out": DeviceStub((3, 256))} | change)
    with pytest.raises(KernelArgumentError, match=message):
        delta_net_step(**step_arguments() | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gates": (DeviceStub((4,)), DeviceStub((3,)))}, "rate: shape"),
        ({"weight": DeviceStub((256,))}, "weight: shape"),
        ({"gate": DeviceStub((3, 64))}, "gate: shape"),
        ({"quants": DeviceStub((3, 256))}, "quants: dtype float32, needs int8"),
        ({"scales": DeviceStub((3, 8, 2))}, "scales: shape"),
    ],
)
def test_a_step_of_a_delta_net_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        delta_net_step(**step_arguments() | change)


def test_a_step_of_a_delta_net_refuses_nine_tokens() -> None:
    with pytest.raises(KernelArgumentError, match="9 tokens, needs 1 to 8"):
        delta_net_step(**step_arguments(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": DeviceStub((3, 256))}, "x: shape"),
        ({"out": DeviceStub((2, 512))}, "out: shape"),
        ({"taps": DeviceStub((3, 512))}, "taps: shape"),
        ({"inputs": DeviceStub((4, 512))}, "inputs: shape"),
        ({"positions": DeviceStub((2,), np.int32)}, "positions: shape"),
    ],
)
def test_a_convolution_refuses(change: dict[str, Any], message: str) -> None:
    arguments = {
        "x": DeviceStub((3, 512)),
        "taps": DeviceStub((4, 512)),
        "inputs": DeviceStub((3, 512)),
        "positions": DeviceStub((3,), np.int32),
        "out": DeviceStub((3, 512)),
        "sizes": SIZES,
        "eps": 1e-6,
        "stream": STREAM,
    }
    with pytest.raises(KernelArgumentError, match=message):
        short_convolution(**arguments | change)


def test_a_convolution_of_too_many_taps_is_refused() -> None:
    sizes = replace(SIZES, n_taps=33)
    x = DeviceStub((3, 512))
    arrays = (x, DeviceStub((33, 512)), DeviceStub((32, 512)), DeviceStub((3,), np.int32), x)
    with pytest.raises(KernelArgumentError, match="33 taps, heads of 64 elements"):
        short_convolution(*arrays, sizes=sizes, eps=1e-6, stream=STREAM)


def test_gates_that_do_not_fit_are_refused() -> None:
    rows = DeviceStub((2, 96))
    with pytest.raises(KernelArgumentError, match="heads of 64 elements in rows of 96"):
        norm_gate(rows, DeviceStub((64,)), rows, DeviceStub((2, 96), np.float16), eps=1e-6, stream=STREAM)
    with pytest.raises(KernelArgumentError, match="gate: shape"):
        sigmoid_mul(DeviceStub((8,)), DeviceStub((4,)), stream=STREAM)
    with pytest.raises(KernelArgumentError, match="both: shape"):
        split_groups(DeviceStub((8,)), DeviceStub((8,)), DeviceStub((8,)), width=4, stream=STREAM)
    with pytest.raises(KernelArgumentError, match="8 elements in groups of 3"):
        split_groups(DeviceStub((16,)), DeviceStub((8,)), DeviceStub((8,)), width=3, stream=STREAM)
