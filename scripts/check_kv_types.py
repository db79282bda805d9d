"""Every pair of KV types at every head size: CPU attention against the float64 oracle, spans whole and cut.

    python -m scripts.check_kv_types [--head-dims 64 128 256] [--types f16 q4_0 ...]

One line for each head size; the exit code is 1 if a pair is outside the bounds of the tests. The test suite itself
runs all pairs at head size 64.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # the oracle's products would leave threads polling beside ours

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from kvs_core.cpu.threads import ThreadTeam
from kvs_core.kv_types import KvType
from tests.kernels.attention_runs import KERNELS, assert_close, assert_same_bits, random_queries, run
from tests.kernels.paged_cache import geometry_of, random_cache

SEED = 8
N_KV, N_TOKENS, GROUP = 150, 4, 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 96, 128, 192, 256])
    types = [kv_type.value for kv_type in KvType]
    parser.add_argument("--types", nargs="+", default=types, choices=types)
    args = parser.parse_args()
    n_wrong = 0
    with ThreadTeam(2) as team:
        for head_dim in args.head_dims:
            fitting = [name for name in args.types if head_dim % KvType(name).block_elements == 0]
            pairs = [(type_k, type_v) for type_k in fitting for type_v in fitting]
            wrong = [pair for pair in pairs if not check_pair(*pair, head_dim, team)]
            n_wrong += len(wrong)
            print(f"head size {head_dim}: {len(pairs) - len(wrong)} of {len(pairs)} pairs right", flush=True)
    return 1 if n_wrong else 0


def check_pair(type_k: str, type_v: str, head_dim: int, team: ThreadTeam) -> bool:
    """Decode and prefill of one pair; says on standard error what is wrong."""
    rng = np.random.default_rng(SEED)
    cache = random_cache(rng, geometry_of(head_dim_k=head_dim, type_k=type_k, type_v=type_v), N_KV)
    q = random_queries(rng, cache, N_TOKENS, GROUP)
    q *= np.float32(np.sqrt(64 / head_dim))  # scores as large as with head size 64, which the tests' scale is for
    first_pos = N_KV - N_TOKENS
    is_right = True
    for kernel in KERNELS:
        try:
            whole = run(kernel, cache, q, team, first_pos=first_pos)
            assert_close(whole, cache, q, first_pos=first_pos)
            assert_same_bits(run(kernel, cache, q, team, first_pos=first_pos, spans=[0, 1, 3, cache.n_pages]), whole)
        except AssertionError as error:
            print(f"{kernel} {type_k}/{type_v} head size {head_dim}: {error}", file=sys.stderr)
            is_right = False
    return is_right


if __name__ == "__main__":
    sys.exit(main())
