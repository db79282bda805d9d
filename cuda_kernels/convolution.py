"""The short convolution before a delta net: taps, SiLU, and the lengths of queries and keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, int64, types

from cuda_kernels.delta_gates import lanes_sum, silu
from cuda_kernels.delta_tiles import HEAD_DIM_STEP
from cuda_kernels.emit import Emitter, Value, emitted, floats
from cuda_kernels.intrinsics import load_float, load_int, store_float
from cuda_kernels.launch import Kernel, address_of, check_array, kernel_builder
from cuda_kernels.overlap import wait_for_previous
from kvs_core.errors import KernelArgumentError
from kvs_core.recurrent_shape import RecurrentShape
from kvs_core.units import ceil_div

RUN_TOKENS = 32
"""Tokens that a block takes one after the other; a step of a decode has fewer, so one block sees all of them."""
COPY_THREADS = 256


class Window:
    """One channel's last inputs in registers. Attributes that are intrinsics:

    load(address) -> window      its inputs, oldest first, a row of ``n_channels`` apart
    load_taps(address) -> taps   the same for the taps, which no kernel writes
    store(address, window)
    zeros() -> window
    move(window, taps, x) -> the sum of taps times inputs, ``x`` the last of these, then the window after ``x``
    """

    def __init__(self, n_taps: int, n_channels: int) -> None:
        self.n_earlier, self.stride = n_taps - 1, 4 * n_channels
        window, taps = floats(n_taps - 1), floats(n_taps)
        self.load = emitted(window, types.int64)(self._load)
        self.load_taps = emitted(taps, types.int64)(self._load_taps)
        self.store = emitted(types.void, types.int64, window)(self._store)
        self.zeros = emitted(window)(lambda emit: [emit.float(0.0)] * self.n_earlier)
        self.move = emitted(taps, window, taps, types.float32)(self._move)

    def _load(self, emit: Emitter, address: Value) -> list[Value]:
        return [emit.load_recent_floats(address, i * self.stride, 1)[0] for i in range(self.n_earlier)]

    def _load_taps(self, emit: Emitter, address: Value) -> list[Value]:
        return [emit.load_floats(address, i * self.stride, 1)[0] for i in range(self.n_earlier + 1)]

    def _store(self, emit: Emitter, address: Value, window: list[Value]) -> None:
        for i, value in enumerate(window):
            emit.store_float(address, i * self.stride, value)

    def _move(self, emit: Emitter, window: list[Value], taps: list[Value], x: Value) -> list[Value]:
        inputs = [*window, x]
        total = emit.float_multiply(inputs[0], taps[0])
        for value, tap in zip(inputs[1:], taps[1:], strict=True):
            total = emit.fma(value, tap, total)
        return [total, *inputs[1:]]


@kernel_builder
def build_short_convolution_kernel(sizes: RecurrentShape) -> Kernel:
    """A block takes a head of up to ``RUN_TOKENS`` tokens, a thread a channel.

    Where one block sees all tokens it also leaves the last inputs; else ``build_keep_inputs_kernel`` does so later, as
    the first block still reads those of before.
    """
    head_dim, n_channels, n_head_k, n_earlier = sizes.head_dim, sizes.n_channels, sizes.n_head_k, sizes.n_taps - 1
    window = Window(sizes.n_taps, n_channels)
    load, load_taps, store, zeros, move = window.load, window.load_taps, window.store, window.zeros, window.move
    n_warps = head_dim // 32
    query_factor = 1.0 / math.sqrt(head_dim)

    def short_convolution_kernel(x, taps, inputs, positions, out, n_tokens, eps):
        partial = cuda.shared.array(n_warps, float32)
        tid = int32(cuda.threadIdx.x)
        head, begin = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y) * int32(RUN_TOKENS)
        end = min(begin + int32(RUN_TOKENS), n_tokens)
        at = (int64(head) * head_dim + tid) * 4
        factors = load_taps(taps + at)
        earlier = load(inputs + at)  # of a step's kernels only this one touches them
        if load_int(positions) == 0:
            earlier = zeros()
        wait_for_previous()

        row_at = at + int64(begin) * (4 * n_channels)
        if begin > 0:
            earlier = load(x + row_at - int64(n_earlier) * (4 * n_channels))
        value = load_float(x + row_at)
        for token in range(begin, end):
            ahead = value
            if token + 1 < end:
                ahead = load_float(x + row_at + 4 * n_channels)
            moved = move(earlier, factors, value)
            earlier = moved[1:]
            result = silu(moved[0])
            if head < int32(2 * n_head_k):
                total = lanes_sum(result * result)
                if tid & int32(31) == 0:
                    partial[tid >> int32(5)] = total
                cuda.syncthreads()
                total = partial[0]
                for warp in range(1, n_warps):
                    total += partial[warp]
                cuda.syncthreads()
                factor = float32(1.0) / max(math.sqrt(total), eps)
                if head < int32(n_head_k):
                    factor *= float32(query_factor)
                result *= factor
            store_float(out + row_at, result)
            row_at += 4 * n_channels
            value = ahead
        if n_tokens <= int32(RUN_TOKENS):
            store(inputs + at, earlier)

    signature = [types.int64] * 5 + [types.int32, types.float32]
    return Kernel(short_convolution_kernel, signature, n_threads=head_dim, overlaps=True)


@kernel_builder
def build_keep_inputs_kernel() -> Kernel:
    """The last rows of ``x`` to ``inputs``, a thread an element."""

    def keep_inputs_kernel(x, inputs):
        i = int64(cuda.grid(1))
        if i < inputs.size:
            inputs[i] = x[x.size - inputs.size + i]

    vector = types.Array(types.float32, 1, "C")
    return Kernel(keep_inputs_kernel, (vector, vector), n_threads=COPY_THREADS)


def short_convolution(
    x: Any, taps: Any, inputs: Any, positions: Any, out: Any, *, sizes: RecurrentShape, eps: float, stream: Any
) -> None:
    """``out`` = silu of every channel's last inputs, its own included, times ``taps``; ``inputs`` moves on.

    Heads of queries and keys are also divided by their lengths, or by ``eps`` if that is more; those of queries by the
    root of the head size besides.

    x, out     float32 [n_tokens, n_channels]        query heads, key heads, value heads; not the same memory
    taps       float32 [n_taps, n_channels]          the last for the token itself
    inputs     float32 [n_taps - 1, n_channels]      taken for zeros if the first token's position is 0
    positions  int32   [n_tokens]
    Raises     KernelArgumentError if shapes or dtypes disagree, or sizes have no kernel.
    """
    n_tokens, n_channels = int(x.shape[0]), sizes.n_channels
    check_array("x", x, np.float32, (None, n_channels))
    check_array("out", out, np.float32, (n_tokens, n_channels))
    check_array("taps", taps, np.float32, (sizes.n_taps, n_channels))
    check_array("inputs", inputs, np.float32, sizes.conv_shape)
    check_array("positions", positions, np.int32, (n_tokens,))
    if sizes.head_dim % HEAD_DIM_STEP or not 2 <= sizes.n_taps <= RUN_TOKENS:
        raise KernelArgumentError(f"short_convolution: {sizes.n_taps} taps, heads of {sizes.head_dim} elements")
    grid = (sizes.n_head, ceil_div(n_tokens, RUN_TOKENS))
    arrays = (address_of(array) for array in (x, taps, inputs, positions, out))
    build_short_convolution_kernel(sizes).launch(grid, stream, *arrays, n_tokens, eps)
    if n_tokens > RUN_TOKENS:
        grid = (ceil_div(inputs.shape[0] * n_channels, COPY_THREADS),)
        build_keep_inputs_kernel().launch(grid, stream, x, inputs)
