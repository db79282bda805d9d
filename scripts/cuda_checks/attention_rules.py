"""Attention under a window, a cap on scores and with sinks, in every combination and at the sizes models have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

from kvs_core.kv_types import KvType, PageGeometry
from scripts.cuda_checks.attention import check_decode, check_prefill, describe
from scripts.cuda_checks.report import Check, Outcome

CAP = 4.0
"""Scores of the checks are of size 2 to 8: this one bends them."""
CASES = (
    (KvType.F16, 256, 256, 2, 300),  # as in gemma2 and gemma3
    (KvType.Q8_0, 256, 64, 4, 1024),
    (KvType.F16, 64, 128, 8, 128),  # as in gpt-oss
    (KvType.Q8_0, 64, 64, 8, 37),
    (KvType.F32, 128, 64, 2, 300),
    (KvType.TURBO4, 128, 256, 3, 512),
    (KvType.Q4_0, 96, 192, 16, 37),
    (KvType.BF16, 192, 64, 1, 700),
)
"""Type, head size, tokens of a page, query heads of a K/V head, window."""
DEPTHS = (16 * 1024 + 1, 128 * 1024 + 700)


def check_rule(
    page: PageGeometry, ratio: int, window: int | None, softcap: float, has_sinks: bool, seed: int
) -> Iterator[Outcome]:
    """Within the first window and behind it, in steps and in prompts."""
    for n_keys in (5, 30, 1313 + 17 * seed):
        yield from check_decode(page, ratio, n_keys, seed, window, softcap=softcap, has_sinks=has_sinks)
    for first_position, n_tokens in ((0, 300), (1100 + 7 * seed, 90)):
        yield from check_prefill(
            page, ratio, first_position, n_tokens, seed, window, softcap=softcap, has_sinks=has_sinks
        )


def check_depths(page: PageGeometry, ratio: int, window: int, seed: int) -> Iterator[Outcome]:
    """Where layers without a window have larger partitions."""
    for n_keys in DEPTHS:
        yield from check_decode(page, ratio, n_keys, seed, window, has_sinks=True)


def checks() -> Iterator[Check]:
    for seed, (kv_type, head_dim, page_tokens, ratio, n_swa) in enumerate(CASES):
        page = PageGeometry(
            page_tokens=page_tokens,
            n_head_kv=2,
            head_dim_k=head_dim,
            head_dim_v=head_dim,
            type_k=kv_type,
            type_v=kv_type,
        )
        for window, softcap, has_sinks in product((None, n_swa), (0.0, CAP), (False, True)):
            if window is None and not softcap and not has_sinks:
                continue  # plain attention has checks of its own
            run = partial(check_rule, page, ratio, window, softcap, has_sinks, seed)
            yield Check(family="rules", case=describe(page, ratio), run=run)
        if head_dim == 64:
            run = partial(check_depths, page, ratio, n_swa, seed)
            yield Check(family="rules", case=describe(page, ratio) + " long", run=run)
