"""Recurrent layers: the short convolution and the gated delta net, with what they remember between steps.

Checks and launches only; the kernels are in ``recurrent_kernels``. Arrays are float32 and C-contiguous, tokens first.
Every token has the same bits however tokens are cut into steps and whatever the team.
Raises (all)  KernelArgumentError if shapes or types disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.cpu import recurrent_kernels as kernels
from kvs_core.cpu.arguments import FLOAT32, check_array
from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.recurrent_shape import HEAD_DIM_STEP, RecurrentShape

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What one layer remembers.

    inputs     [n_taps - 1, n_channels], the last inputs of the convolution, oldest first
    matrices   [n_head_v, head_dim / 16, head_dim, 16]: the 16 columns that one vector updates lie together, because
               lines a whole row apart would share too few sets of the first-level cache
    """

    recurrent: RecurrentShape
    inputs: Floats
    matrices: Floats


def short_convolution(
    x: Floats, taps: Floats, state: LayerState, first_pos: int, heads: Floats, team: ThreadTeam = ALONE
) -> None:
    """``heads`` = silu of every channel's last inputs, its own included, times ``taps``; the state moves on.

    x           [n_tokens, n_channels]: query heads, key heads, value heads
    heads       [2 n_head_k + n_head_v, n_tokens, head_dim], not overlapping ``x``: the tokens of a head lie together
    taps        [n_taps, n_channels], the last for the token itself
    first_pos   position of the first token; at 0 there are no earlier inputs, whatever the state holds
    """
    sizes = state.recurrent
    check_array("x", x, FLOAT32, (None, sizes.n_channels))
    check_array("taps", taps, FLOAT32, (sizes.n_taps, sizes.n_channels))
    check_array("inputs", state.inputs, FLOAT32, sizes.conv_shape)
    check_array("heads", heads, FLOAT32, (sizes.n_head, len(x), sizes.head_dim))
    if np.may_share_memory(x, heads):
        raise KernelArgumentError("x and heads of a convolution share memory")
    kernels.convolve_kernel(team.control, x, taps, state.inputs, first_pos == 0, heads)


def delta_net(
    heads: Floats,
    beta: Floats,
    decay: Floats,
    *,
    bias: Floats,
    rate: Floats,
    eps: float,
    state: LayerState,
    first_pos: int,
    out: Floats,
    team: ThreadTeam = ALONE,
) -> None:
    """The gated delta rule for each value head with matrix M, which is 0 before position 0, token by token::

        M = M * exp(rate * softplus(decay + bias))
        M = M + k * sigmoid(beta) * (v - k M)        an outer product: keys by values
        out = q M / sqrt(head_dim)

    heads   as ``short_convolution`` leaves them; q and k are first divided by their lengths, or by ``eps`` if that is
            more. Overwritten, as are ``beta`` and ``decay``.
    beta, decay   [n_tokens, n_head_v]; bias, rate [n_head_v]
    out     [n_tokens, n_head_v * head_dim]
    Source  Gated Delta Networks, Yang et al. 2024 (arXiv 2412.06464).
    """
    sizes = state.recurrent
    if sizes.head_dim % HEAD_DIM_STEP:
        raise KernelArgumentError(f"heads of {sizes.head_dim} elements; a multiple of {HEAD_DIM_STEP} needed")
    n_tokens = len(beta)
    check_array("heads", heads, FLOAT32, (sizes.n_head, n_tokens, sizes.head_dim))
    check_array("beta", beta, FLOAT32, (n_tokens, sizes.n_head_v))
    check_array("decay", decay, FLOAT32, (n_tokens, sizes.n_head_v))
    check_array("bias", bias, FLOAT32, (sizes.n_head_v,))
    check_array("rate", rate, FLOAT32, (sizes.n_head_v,))
    check_array("matrices", state.matrices, FLOAT32, sizes.state_shape)
    check_array("out", out, FLOAT32, (n_tokens, sizes.n_inner))
    kernels.prepare_delta_kernel(team.control, heads, beta, decay, bias, rate, np.float64(eps), sizes.n_head_k)
    kernels.delta_net_kernel(
        team.control,
        heads,
        beta,
        decay,
        sizes.n_head_k,
        sizes.groups_values,
        state.matrices,
        first_pos == 0,
        out,
    )
