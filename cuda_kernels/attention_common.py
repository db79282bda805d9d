"""What the attention kernels agree on: units of scores, the value that stands for no key, which pages they take."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cuda import int32, uint32

from cuda_kernels.emit import Emitter, Value
from cuda_kernels.intrinsics import load_int
from cuda_kernels.launch import device_function
from cuda_kernels.partitions import WINDOW_KEYS, first_window_partition, partition_bounds
from kvs_core.cuda_scratch import find_head_problem, is_wide, large_begin_of
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
WIDE_STEP = 64  # wide heads are cut into pieces of 16 columns for each of four warps
PAGE_TOKENS_STEP = 64  # tiles of up to 64 keys lie in one page
LOWEST = -1.0e30  # stands for "no key seen yet": finite, so that a difference of two of them is 0
LOG2_E = 1.4426950408889634  # scores are kept in units of log2, for the exponential of the hardware
NO_WINDOW = int(np.iinfo(np.int32).max)


@device_function
def divide(a, b):
    """Quotient and rest of numbers that are not negative, without widening: a power of two costs one instruction."""
    quotient = uint32(uint32(a) // uint32(b))
    return int32(quotient), int32(uint32(a) - quotient * uint32(b))


partition_bounds_on_device = device_function(partition_bounds)
first_window_partition_on_device = device_function(first_window_partition)


def partition_bounds_from(page: PageGeometry, *, in_window: bool) -> Any:
    """Device function ``bounds(positions, index, window)``: the keys of a partition of a step at ``positions``."""
    large_begin = large_begin_of(page)

    def bounds(positions, index, window):
        return partition_bounds_on_device(index, large_begin)

    def bounds_in_window(positions, index, window):
        begin = (first_window_partition_on_device(load_int(positions), window) + index) * int32(WINDOW_KEYS)
        return begin, begin + int32(WINDOW_KEYS)

    return device_function(bounds_in_window if in_window else bounds)


def cap_scores(emit: Emitter, scores: list[Value], scale_log2: Value, softcap: float) -> list[Value]:
    """``softcap * tanh(score / softcap)`` in units of log2, of products that ``scale_log2`` brings to these units.

    As ``c - 2 c / (2^x + 1)``: the error is some units in the last place of the cap, which for a score that becomes an
    exponent is what float32 products of that size have.
    """
    cap = softcap * LOG2_E
    factor = emit.float_multiply(scale_log2, emit.float(2.0 / softcap))
    result = []
    for score in scores:
        power = emit.exp2(emit.float_multiply(score, factor))
        share = emit.float_reciprocal(emit.float_add(power, emit.float(1.0)))
        result.append(emit.fma(share, emit.float(-2.0 * cap), emit.float(cap)))
    return result


def check_page(page: PageGeometry, *, has_rule: bool = False) -> None:
    """Raise KernelArgumentError unless the attention kernels take this page layout.

    ``has_rule``: with a window, a soft cap or sinks.
    """
    for head_dim, kv_type in ((page.head_dim_k, page.type_k), (page.head_dim_v, page.type_v)):
        if head_dim % kv_type.block_elements or (is_wide(page) and head_dim % WIDE_STEP):
            raise KernelArgumentError(f"attention: head size {head_dim} with {kv_type.value} in such pages")
    problem = find_head_problem(
        page.head_dim_k, page.head_dim_v, n_head=page.n_head_kv, n_head_kv=page.n_head_kv, v_in_k=page.v_in_k
    )
    if problem is not None:
        raise KernelArgumentError(f"attention: {problem}")
    if has_rule and is_wide(page):
        raise KernelArgumentError("attention: heads of this size have no window, no soft cap and no sinks")
    if page.page_tokens % PAGE_TOKENS_STEP:
        raise KernelArgumentError(
            f"attention: pages of {page.page_tokens} tokens, needs a multiple of {PAGE_TOKENS_STEP}"
        )


def check_heads(page: PageGeometry, n_head: int) -> int:
    """Query heads per KV head; raises KernelArgumentError unless that is a whole number that there are kernels for."""
    problem = find_head_problem(
        page.head_dim_k, page.head_dim_v, n_head=n_head, n_head_kv=page.n_head_kv, v_in_k=page.v_in_k
    )
    if problem is not None or n_head < page.n_head_kv:
        raise KernelArgumentError(f"attention: {problem or f'{n_head} query heads over {page.n_head_kv}'}")
    return n_head // page.n_head_kv
