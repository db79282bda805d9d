"""What the attention kernels agree on: units of scores, the value that stands for no key, which pages they take."""

from __future__ import annotations

import numpy as np

from cuda_kernels.launch import device_function
from cuda_kernels.partitions import partition_bounds
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import PageGeometry

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
PAGE_TOKENS_STEP = 64  # tiles of up to 64 keys lie in one page
LOWEST = -1.0e30  # stands for "no key seen yet": finite, so that a difference of two of them is 0
LOG2_E = 1.4426950408889634  # scores are kept in units of log2, for the exponential of the hardware
NO_WINDOW = int(np.iinfo(np.int32).max)

partition_bounds_on_device = device_function(partition_bounds)


def check_page(page: PageGeometry) -> None:
    """Raise KernelArgumentError unless the attention kernels take this page layout."""
    for head_dim, kv_type in ((page.head_dim_k, page.type_k), (page.head_dim_v, page.type_v)):
        if head_dim not in HEAD_DIMS or head_dim % kv_type.block_elements:
            raise KernelArgumentError(f"attention: head size {head_dim} with {kv_type.value}, needs one of {HEAD_DIMS}")
    if page.page_tokens % PAGE_TOKENS_STEP:
        raise KernelArgumentError(
            f"attention: pages of {page.page_tokens} tokens, needs a multiple of {PAGE_TOKENS_STEP}"
        )


def check_heads(page: PageGeometry, n_head: int) -> int:
    """Query heads per KV head; raises KernelArgumentError unless that is a whole number from 1 to 16."""
    gqa_ratio, rest = divmod(n_head, page.n_head_kv)
    if rest or not 1 <= gqa_ratio <= 16:
        raise KernelArgumentError(
            f"attention: {n_head} query heads over {page.n_head_kv} KV heads, needs a ratio of 1 to 16"
        )
    return gqa_ratio
