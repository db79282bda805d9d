"""Check every CUDA kernel against float64 oracles, one line an outcome; exit code 1 if anything failed.

    python -m scripts.check_cuda [--only FAMILY ...] [--small] [--slice I/N] [--failures] [--cases TEXT ...]
                                  [--every-pair HEAD_SIZE ...]

Families: decode, prefill, rules, store, weights, rows, fused, recurrent, streamed, experts, heads. ``--slice 2/4`` runs
every fourth case from the second, so that several processes can share the compilation. ``--small`` keeps a few cases of
every kernel that reads and writes little, for tools that slow kernels down (``sanitize_cuda``). ``--every-pair`` checks
attention alone, for all pairs of cache types instead of a covering set. ``--cases`` keeps those whose name contains one
of the texts.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from itertools import chain

from numba import cuda

from cuda_kernels.attention_common import HEAD_DIMS
from scripts.cuda_checks import (
    attention,
    attention_rules,
    expert_streams,
    experts,
    fused,
    heads,
    recurrent,
    rows,
    small_steps,
    streamed,
    weights,
)
from scripts.cuda_checks.report import Check, Outcome

_ATTENTION = ("decode", "prefill", "rules", "store")
FAMILIES = (*_ATTENTION, "weights", "rows", "fused", "recurrent", "streamed", "experts", "heads")
_SMALL_PAGES = ("f16/f16 d64 ", "q8_0/q8_0 d128 ", "f32/q4_1 d128 ", "q8_0/turbo4 d128 ", "turbo3/q5_1 d128 ")
SMALL_CASES = {
    "decode": _SMALL_PAGES,
    "prefill": ("f16/f16 d64 ", "q8_0/q8_0 d128 ", "f32/f32 d96 ", "bf16/iq4_nl d128 ", "turbo3/q5_1 d128 "),
    "rules": ("f16/f16 d64 ", "f32/f32 d128 "),
    "store": _SMALL_PAGES,
    "weights": ("Q4_1", "Q8_0", "Q4_K", "F16"),
    "rows": (
        *(
            "norm 576",
            "rope",
            "activation",
            "sequence",
            "logits",
            "scaling",
            "softplus",
            "add normed 640",
            "norm heads",
        ),
    ),
    "fused": (
        "rotate heads",
        "products Q4_K",
        "products Q8_0",
        "gated Q4_K",
        "norm and quantise 576",
        "token ids",
        "quantised fold",
    ),
    "recurrent": ("prompt 2 of 2", "steps 2 of 2", "gates"),
    "streamed": ("Q4_K",),
    "experts": ("route", "order", "combine", "decode Q8_0", "decode Q4_K", "prefill Q4_K", "streamed Q8_0"),
    "heads": ("Q8_0",),
}
"""How the cases of a family begin that ``--small`` keeps, those of long contexts excepted."""


def is_small(check: Check) -> bool:
    return check.case.startswith(SMALL_CASES[check.family]) and not check.case.endswith("long")


def select(
    only: Sequence[str], part: str, small: bool, head_dims: Sequence[int], texts: Sequence[str]
) -> Iterator[Check]:
    index, count = (int(number) for number in part.split("/"))
    if not 1 <= index <= count:
        raise SystemExit(f"error: --slice {part}: needs I/N with 1 <= I <= N")
    families = (attention, attention_rules, weights, rows, small_steps, fused, recurrent, streamed, experts, heads)
    families += (expert_streams,)
    covering = chain.from_iterable(family.checks() for family in families)
    every = attention.pair_checks(head_dims) if head_dims else covering
    wanted = [
        check
        for check in every
        if check.family in only and (not small or is_small(check)) and any(text in check.case for text in texts)
    ]
    yield from wanted[index - 1 :: count]


def outcomes(check: Check) -> Iterator[Outcome]:
    """Those of the check, and a failed one if it could not be carried through."""
    try:
        yield from check.run()
    except Exception as error:
        traceback.print_exc()
        yield Outcome(what=f"{type(error).__name__}, see above", error=math.inf, bound=0.0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--small", action="store_true", help="only small cases")
    parser.add_argument("--slice", default="1/1", metavar="I/N")
    parser.add_argument("--failures", action="store_true", help="print only the lines that failed")
    parser.add_argument("--every-pair", nargs="+", type=int, choices=HEAD_DIMS, default=(), metavar="HEAD_SIZE")
    parser.add_argument("--cases", nargs="+", default=[""], metavar="TEXT", help="cases whose name contains one")
    arguments = parser.parse_args(argv)

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    print(f"{name}, compute capability {'.'.join(map(str, device.compute_capability))}")
    n_passed = n_failed = 0
    start = time.perf_counter()
    wanted = (arguments.only, arguments.slice, arguments.small, arguments.every_pair, arguments.cases)
    for check in select(*wanted):
        for outcome in outcomes(check):
            n_passed += outcome.passed
            n_failed += not outcome.passed
            if not outcome.passed or not arguments.failures:
                verdict = "ok  " if outcome.passed else "FAIL"
                line = f"{verdict} {check.family:8} {check.case:34} {outcome.what:44}"
                print(f"{line} {outcome.error:9.2e} of {outcome.bound:9.2e}", flush=True)
    print(f"{n_passed} passed, {n_failed} failed in {time.perf_counter() - start:.0f} s")
    return 1 if n_failed or not n_passed else 0


if __name__ == "__main__":
    sys.exit(main())
