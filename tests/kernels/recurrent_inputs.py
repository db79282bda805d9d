"""Random inputs of a recurrent layer, and what the oracle makes of them: shared by the checks of every backend."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.recurrent_shape import RecurrentShape
from tests.oracles import delta_net as oracle

Floats = NDArray[np.float32]
SEED = 35
EPS = 1e-6


@dataclass(frozen=True)
class Inputs:
    """One layer's inputs for a run of tokens."""

    x: Floats
    taps: Floats
    beta: Floats
    decay: Floats
    bias: Floats
    rate: Floats


def random_inputs(sizes: RecurrentShape, n_tokens: int) -> Inputs:
    rng = np.random.default_rng([SEED, n_tokens, sizes.n_channels])

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape).astype(np.float32)

    return Inputs(
        x=normal(n_tokens, sizes.n_channels),
        taps=normal(sizes.n_taps, sizes.n_channels),
        beta=normal(n_tokens, sizes.n_head_v),
        decay=normal(n_tokens, sizes.n_head_v),
        bias=normal(sizes.n_head_v),
        rate=-np.exp(-2 + normal(sizes.n_head_v)),
    )


def by_formula(
    inputs: Inputs, sizes: RecurrentShape, dtype: type[np.floating]
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Outputs [n_tokens, n_inner] and final matrices [n_head_v, keys, values] after the convolution's float64 heads."""
    mixed = oracle.short_convolution(inputs.x, inputs.taps).astype(dtype)
    heads = mixed.reshape(len(mixed), sizes.n_head, sizes.head_dim)
    q, k = (oracle.unit_heads(heads[:, part * sizes.n_head_k : (part + 1) * sizes.n_head_k], EPS) for part in range(2))
    share, log_kept = oracle.gates(
        *(array.astype(dtype) for array in (inputs.beta, inputs.decay, inputs.bias, inputs.rate))
    )
    outs, matrices = [], []
    for head in range(sizes.n_head_v):
        of_key = head // (sizes.n_head_v // sizes.n_head_k) if sizes.groups_values else head % sizes.n_head_k
        v = heads[:, 2 * sizes.n_head_k + head]
        out, matrix = oracle.delta_rule(q[:, of_key], k[:, of_key], v, share[:, head], log_kept[:, head])
        outs.append(out)
        matrices.append(matrix)
    return np.concatenate(outs, axis=1), np.stack(matrices)
