"""What sampling and perplexity need of a row of logits without copying the row: largest, log-sum-exp, top k.

One block a row, fixed orders. Choosing a token from the result is the host's work.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import float32, int32, types, uint32

from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.launch import IN_SIMULATOR, Kernel, check_array, device_function, kernel_builder
from cuda_kernels.reduce import BLOCK_THREADS, block_max, block_sum
from kvs_core.errors import KernelArgumentError

_LOGITS = types.Array(types.float32, 2, "C")
_VALUES = types.Array(types.float32, 1, "C")
_IDS = types.Array(types.int32, 1, "C")
_RADIX_BITS = 8
_RADIX = 1 << _RADIX_BITS


if IN_SIMULATOR:

    @device_function
    def float_bits(value):
        """The 32 bits of a float32."""
        return np.float32(value).view(np.uint32)

else:

    @emitted(types.uint32, types.float32)
    def float_bits(emit: Emitter, value: Value) -> Value:
        """The 32 bits of a float32."""
        return emit.as_word(value)


@device_function
def sort_key(value):
    """A float32 as an unsigned number of the same order; not for NaN."""
    bits = uint32(float_bits(value))
    return uint32(bits ^ uint32(0xFFFFFFFF)) if bits >> uint32(31) else uint32(bits ^ uint32(0x80000000))


@kernel_builder
def build_row_summary_kernel() -> Kernel:
    """Largest logit (lowest token where several are equal) and log-sum-exp of every row."""

    def row_summary_kernel(logits, best_ids, log_sums):
        scratch = cuda.shared.array(BLOCK_THREADS, float32)
        row = cuda.blockIdx.x
        n_vocab = logits.shape[1]

        largest = float32(-np.inf)
        for i in range(cuda.threadIdx.x, n_vocab, BLOCK_THREADS):
            largest = max(largest, logits[row, i])
        largest = block_max(largest, scratch)

        total = float32(0.0)
        first = int32(n_vocab)
        for i in range(cuda.threadIdx.x, n_vocab, BLOCK_THREADS):
            value = logits[row, i]
            total += math.exp(value - largest)
            if value == largest:
                first = min(first, int32(i))
        total = block_sum(total, scratch)
        lowest = -block_max(float32(-first), scratch)  # exact: token ids are far below 2**24

        if cuda.threadIdx.x == 0:
            best_ids[row] = int32(lowest)
            log_sums[row] = largest + math.log(total)

    return Kernel(row_summary_kernel, (_LOGITS, _IDS, _VALUES), n_threads=BLOCK_THREADS)


def row_summary(logits: Any, best_ids: Any, log_sums: Any, *, stream: Any) -> None:
    """Greedy token and log of the sum of exponentials of every row.

    logits     float32 [n_rows, n_vocab]    finite, or minus infinity for tokens that are out
    best_ids   int32   [n_rows]
    log_sums   float32 [n_rows]
    Raises     KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("logits", logits, np.float32, (None, None))
    check_array("best_ids", best_ids, np.int32, (logits.shape[0],))
    check_array("log_sums", log_sums, np.float32, (logits.shape[0],))
    build_row_summary_kernel().launch((logits.shape[0],), stream, logits, best_ids, log_sums)


@kernel_builder
def build_top_k_kernel() -> Kernel:
    """The k-th largest by radix selection, then every larger logit and the first equal ones, by token.

    A thread owns a run of consecutive tokens, so that the places of its finds follow from counts and no order depends
    on timing; the histograms count integers, which no order changes either.
    """

    def top_k_kernel(logits, k, values, ids):
        histogram = cuda.shared.array(_RADIX, int32)
        chosen = cuda.shared.array(2, uint32)
        larger_before = cuda.shared.array(BLOCK_THREADS, int32)
        equal_before = cuda.shared.array(BLOCK_THREADS, int32)
        tid = cuda.threadIdx.x
        row = cuda.blockIdx.x
        n_vocab = logits.shape[1]

        prefix = uint32(0)
        wanted = k
        for digit in range(32 // _RADIX_BITS):
            shift = uint32(32 - _RADIX_BITS * (digit + 1))
            histogram[tid] = 0
            cuda.syncthreads()
            for i in range(tid, n_vocab, BLOCK_THREADS):
                key = sort_key(logits[row, i])
                # the digits above this one, or nothing at the first: a shift by 32 bits is not defined
                if digit == 0 or key >> uint32(shift + uint32(_RADIX_BITS)) == prefix:
                    cuda.atomic.add(histogram, int32((key >> shift) & uint32(_RADIX - 1)), int32(1))
            cuda.syncthreads()
            if tid == 0:
                left = wanted
                bucket = _RADIX - 1
                while histogram[bucket] < left:
                    left -= histogram[bucket]
                    bucket -= 1
                chosen[0] = uint32(bucket)
                chosen[1] = uint32(left)
            cuda.syncthreads()
            prefix = uint32((prefix << uint32(_RADIX_BITS)) | chosen[0])
            wanted = int32(chosen[1])

        run = (n_vocab + BLOCK_THREADS - 1) // BLOCK_THREADS
        begin = min(tid * run, n_vocab)
        end = min(begin + run, n_vocab)
        n_larger = 0
        n_equal = 0
        for i in range(begin, end):
            key = sort_key(logits[row, i])
            n_larger += 1 if key > prefix else 0
            n_equal += 1 if key == prefix else 0
        larger_before[tid] = n_larger
        equal_before[tid] = n_equal
        cuda.syncthreads()
        if tid == 0:
            all_larger = 0
            all_equal = 0
            for i in range(BLOCK_THREADS):
                mine_larger = larger_before[i]
                mine_equal = equal_before[i]
                larger_before[i] = all_larger
                equal_before[i] = all_equal
                all_larger += mine_larger
                all_equal += mine_equal
        cuda.syncthreads()

        larger_at = larger_before[tid]
        equal_at = k - wanted + equal_before[tid]
        for i in range(begin, end):
            key = sort_key(logits[row, i])
            if key > prefix:
                values[row, larger_at] = logits[row, i]
                ids[row, larger_at] = i
                larger_at += 1
            elif key == prefix:
                if equal_at < k:
                    values[row, equal_at] = logits[row, i]
                    ids[row, equal_at] = i
                equal_at += 1

    ids_2d = types.Array(types.int32, 2, "C")
    return Kernel(top_k_kernel, (_LOGITS, types.int32, _LOGITS, ids_2d), n_threads=BLOCK_THREADS)


def top_k(logits: Any, values: Any, ids: Any, *, stream: Any) -> None:
    """The ``k`` largest logits of every row: those above the k-th by token, then those equal to it by token.

    logits   float32 [n_rows, n_vocab]    no NaN
    values   float32 [n_rows, k]          k at most n_vocab
    ids      int32   [n_rows, k]
    Raises   KernelArgumentError if shapes or dtypes disagree.
    """
    check_array("logits", logits, np.float32, (None, None))
    n_rows, n_vocab = logits.shape
    check_array("values", values, np.float32, (n_rows, None))
    k = values.shape[1]
    check_array("ids", ids, np.int32, (n_rows, k))
    if not 1 <= k <= n_vocab:
        raise KernelArgumentError(f"top_k: k {k}, needs 1 to {n_vocab}")
    build_top_k_kernel().launch((n_rows,), stream, logits, k, values, ids)
