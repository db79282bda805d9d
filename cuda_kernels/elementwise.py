"""Small element-wise steps: sums, gates, halves of groups, and number sequences made on the device without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int64, types

from cuda_kernels.launch import Kernel, check_array, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from kvs_core.errors import KernelArgumentError
from kvs_core.units import ceil_div

N_THREADS = 256
MAX_STEP_TOKENS = 8
"""Tokens whose ids travel as parameters of a kernel."""

_IDS = types.Array(types.int32, 1, "C")
_VECTOR = types.Array(types.float32, 1, "C")


@kernel_builder
def build_add_kernel() -> Kernel:
    """``x += y``; ``y`` repeats every ``y.size`` elements."""

    def add_kernel(x, y):
        i = cuda.grid(1)
        wait_for_previous()
        if i < x.size:
            x[i] += y[i % y.size]

    return Kernel(add_kernel, (_VECTOR, _VECTOR), n_threads=N_THREADS, overlaps=True)


@kernel_builder
def build_log_position_kernel() -> Kernel:
    """``x[row] *= 1 + scale * ln(positions[row] // n_step + 1)``."""

    def log_position_kernel(x, positions, scale, n_step):
        i = cuda.grid(1)
        n_cols = x.shape[1]
        if i < x.shape[0] * n_cols:
            row = i // n_cols
            n_begun = int64(positions[row]) // n_step + 1
            x[row, i % n_cols] *= float32(1.0) + scale * math.log(float32(n_begun))

    signature = (types.Array(types.float32, 2, "C"), types.Array(types.int32, 1, "C"), types.float32, types.int64)
    return Kernel(log_position_kernel, signature, n_threads=N_THREADS)


@kernel_builder
def build_sigmoid_mul_kernel() -> Kernel:
    """``x *= sigmoid(gate)``."""

    def sigmoid_mul_kernel(x, gate):
        i = int64(cuda.grid(1))
        if i < x.size:
            x[i] = x[i] / (float32(1.0) + math.exp(-gate[i]))

    return Kernel(sigmoid_mul_kernel, (_VECTOR, _VECTOR), n_threads=N_THREADS)


@kernel_builder
def build_split_groups_kernel() -> Kernel:
    """The first ``width`` of every ``2 * width`` elements to ``first``, the others to ``second``."""

    def split_groups_kernel(both, first, second, width):
        i = int64(cuda.grid(1))
        if i < first.size:
            at = i // width * (2 * width) + i % width
            first[i] = both[at]
            second[i] = both[at + width]

    return Kernel(split_groups_kernel, (_VECTOR, _VECTOR, _VECTOR, types.int64), n_threads=N_THREADS)


@kernel_builder
def build_resize_heads_kernel() -> Kernel:
    """Rows of heads copied to rows of longer or shorter heads; zeros where there is nothing to copy."""

    def resize_heads_kernel(x, out):
        i = cuda.grid(1)
        if i < out.size:
            head, element = i // out.shape[1], i % out.shape[1]
            out[head, element] = x[head, element] if element < x.shape[1] else float32(0.0)

    matrix = types.Array(types.float32, 2, "C")
    return Kernel(resize_heads_kernel, (matrix, matrix), n_threads=N_THREADS)


@kernel_builder
def build_count_kernel(element: Any) -> Kernel:
    """``out[begin + i] = first + i % period * step``."""

    def count_kernel(out, begin, count, first, step, period):
        i = int64(cuda.grid(1))
        if i < count:
            out[begin + i] = first + i % period * step

    signature = (types.Array(element, 1, "C"), *[types.int64] * 5)
    return Kernel(count_kernel, signature, n_threads=N_THREADS)


@kernel_builder
def build_write_step_kernel() -> Kernel:
    """Token ids from the kernel's own parameters, and their positions."""

    def write_step_kernel(tokens, positions, ids, first_pos):
        for i in range(tokens.shape[0]):
            tokens[i] = ids[i]
            positions[i] = first_pos + i

    signature = (_IDS, _IDS, types.UniTuple(types.int32, MAX_STEP_TOKENS), types.int32)
    return Kernel(write_step_kernel, signature, n_threads=1)


def add_in_place(x: Any, y: Any, *, stream: Any) -> None:
    """``x = x + y`` for vectors; a shorter ``y`` is repeated: a bias for each of several rows.

    x        float32 [n]
    y        float32 [m]     n a multiple of m
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None,))
    check_array("y", y, np.float32, (None,))
    build_add_kernel().launch((ceil_div(x.shape[0], N_THREADS),), stream, x, y)


def resize_heads(x: Any, out: Any, *, stream: Any) -> None:
    """Each row at the size of ``out``: zeros are added, or its end left out.

    x, out     float32 [n_rows, a], [n_rows, b]
    Raises     KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("out", out, np.float32, (x.shape[0], None))
    build_resize_heads_kernel().launch((ceil_div(out.shape[0] * out.shape[1], N_THREADS),), stream, x, out)


def scale_by_log_position(x: Any, positions: Any, *, scale: float, n_step: int, stream: Any) -> None:
    """``x *= 1 + scale * ln(floor(position / n_step) + 1)`` for each row, in place.

    x           float32 [n_rows, n_cols]
    positions   int32 [n_rows]
    Raises      KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None, None))
    check_array("positions", positions, np.int32, (x.shape[0],))
    grid = (ceil_div(x.shape[0] * x.shape[1], N_THREADS),)
    build_log_position_kernel().launch(grid, stream, x, positions, scale, n_step)


def sigmoid_mul(x: Any, gate: Any, *, stream: Any) -> None:
    """``x = x * sigmoid(gate)``.

    x, gate  float32 [n]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("x", x, np.float32, (None,))
    check_array("gate", gate, np.float32, x.shape)
    build_sigmoid_mul_kernel().launch((ceil_div(x.shape[0], N_THREADS),), stream, x, gate)


def split_groups(both: Any, first: Any, second: Any, *, width: int, stream: Any) -> None:
    """Groups of ``2 * width`` elements: the first half of each goes to ``first``, the other to ``second``.

    both            float32 [2 n]     n a multiple of ``width``
    first, second   float32 [n]       not in the memory of ``both``
    Raises          KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("first", first, np.float32, (None,))
    check_array("second", second, np.float32, first.shape)
    check_array("both", both, np.float32, (2 * first.shape[0],))
    if first.shape[0] % width:
        raise KernelArgumentError(f"split_groups: {first.shape[0]} elements in groups of {width}")
    grid = (ceil_div(first.shape[0], N_THREADS),)
    build_split_groups_kernel().launch(grid, stream, both, first, second, width)


def write_sequence(
    out: Any, *, begin: int, count: int, first: int, step: int, period: int | None = None, stream: Any
) -> None:
    """``out[begin + i] = first + i * step`` for ``count`` elements, from the beginning again every ``period``.

    out      int32 or int64 [n]
    Raises   KernelArgumentError if the dtype is another.
    """
    element = types.int32 if out.dtype == np.int32 else types.int64
    check_array("out", out, np.int32 if element is types.int32 else np.int64, (None,))
    arguments = (out, begin, count, first, step, period or count)
    build_count_kernel(element).launch((ceil_div(count, N_THREADS),), stream, *arguments)


def write_step(tokens: Any, positions: Any, *, ids: Sequence[int], first_pos: int, stream: Any) -> None:
    """Ids and positions of the tokens of a short step, without a copy from the host.

    tokens, positions   int32 [n_tokens]     n_tokens 1 to 8
    Raises              KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("tokens", tokens, np.int32, (len(ids),))
    check_array("positions", positions, np.int32, (len(ids),))
    if not 1 <= len(ids) <= MAX_STEP_TOKENS:
        raise KernelArgumentError(f"write_step: {len(ids)} tokens, needs 1 to {MAX_STEP_TOKENS}")
    padded = [*ids, *[0] * (MAX_STEP_TOKENS - len(ids))]
    build_write_step_kernel().launch((1,), stream, tokens, positions, padded, first_pos)
