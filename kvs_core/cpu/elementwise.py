"""Operations on rows of activations: norm, rotary embedding, gates, caps, additions. Products are in ``matmul``.

Arrays are float32 and C-contiguous, tokens first. ``team`` shares the rows of large arrays among threads; without
one, or for a few tokens, the calling thread does all. Results do not depend on it.
Raises (all)  KernelArgumentError if shapes or types disagree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvs_core.cpu import elementwise_kernels as kernels
from kvs_core.cpu.threads import ALONE, ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.model_shape import RopeKind

Floats = NDArray[np.float32]


def rms_norm(x: Floats, weight: Floats, eps: float, out: Floats, team: ThreadTeam = ALONE) -> None:
    """``out = x / sqrt(mean(x^2) + eps) * weight`` for each row.

    x, out   [n_rows, n]; may be the same array
    weight   [n]
    """
    if x.ndim != 2:
        raise KernelArgumentError(f"x must be [n_rows, n], got {x.shape}")
    _check("x", x, x.shape)
    _check("weight", weight, x.shape[1:])
    _check("out", out, x.shape)
    kernels.rms_norm_kernel(team.control, x, weight, eps, out)


def rms_norm_first(x: Floats, weight: Floats, eps: float, team: ThreadTeam = ALONE) -> None:
    """``rms_norm`` of the first ``len(weight)`` elements of each row, in place; the others stay.

    x        [n_rows, n]; weight of at most n elements
    """
    if x.ndim != 2 or not 1 <= weight.size <= x.shape[1]:
        raise KernelArgumentError(f"x must be [n_rows, {weight.size} or more], got {x.shape}")
    _check("x", x, x.shape)
    _check("weight", weight, (weight.size,))
    kernels.rms_norm_kernel(team.control, x, weight, eps, x)


def rope(
    x: Floats,
    first_pos: int,
    freqs: Floats,
    magnitude: float,
    kind: RopeKind,
    team: ThreadTeam = ALONE,
    *,
    begin: int = 0,
) -> None:
    """Rotate every head of token ``t`` by the angles of position ``first_pos + t``, in place.

    x           [n_tokens, n_head, head_dim]; elements before ``begin`` and past 2 * n_pairs from there stay as they are
    freqs       [n_pairs], radians per position; angles are products in float32, as in llama.cpp
    magnitude   factor of cosine and sine
    Positions times the largest frequency may reach 6 million radians.
    """
    if x.ndim != 3 or begin < 0 or begin + 2 * freqs.size > x.shape[2]:
        raise KernelArgumentError(f"x must be [n_tokens, n_head, head_dim >= {begin + 2 * freqs.size}], got {x.shape}")
    _check("x", x, x.shape)
    _check("freqs", freqs, (freqs.size,))
    kernels.rope_kernel(team.control, x, begin, first_pos, freqs, np.float32(magnitude), kind is RopeKind.NEOX)


def resize_heads(x: Floats, n_head: int, out: Floats) -> None:
    """Copy every head of ``x`` into ``out``, whose heads may be longer, zeros then follow, or shorter.

    x, out   [n_tokens, n_head * head_dim], each with its own head size
    """
    if x.ndim != 2 or out.ndim != 2 or n_head < 1 or x.shape[1] % n_head or out.shape[1] % n_head:
        raise KernelArgumentError(f"{x.shape} and {out.shape} are not rows of {n_head} heads")
    _check("x", x, x.shape)
    _check("out", out, (x.shape[0], out.shape[1]))
    heads, resized = x.reshape(len(x), n_head, -1), out.reshape(len(x), n_head, -1)
    n_kept = min(heads.shape[2], resized.shape[2])
    resized[:, :, :n_kept] = heads[:, :, :n_kept]
    resized[:, :, n_kept:] = 0.0


def silu_mul(gate: Floats, up: Floats, out: Floats, team: ThreadTeam = ALONE) -> None:
    """``out = silu(gate) * up``, where ``silu(x) = x / (1 + exp(-x))``; ``out`` may be either input."""
    _check("gate", gate, gate.shape)
    _check("up", up, gate.shape)
    _check("out", out, gate.shape)
    kernels.silu_mul_kernel(team.control, gate, up, out)


def gelu_mul(gate: Floats, up: Floats, out: Floats, team: ThreadTeam = ALONE) -> None:
    """``out = gelu(gate) * up`` with the tanh form of GELU; ``out`` may be either input.

    ``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))``
    """
    _check("gate", gate, gate.shape)
    _check("up", up, gate.shape)
    _check("out", out, gate.shape)
    kernels.gelu_mul_kernel(team.control, gate, up, out)


def clamped_swiglu(gate: Floats, up: Floats, out: Floats, team: ThreadTeam = ALONE) -> None:
    """``out = g sigmoid(1.702 g) (u + 1)``, g the gate up to 7, u ``up`` between -7 and 7; may be either input."""
    _check("gate", gate, gate.shape)
    _check("up", up, gate.shape)
    _check("out", out, gate.shape)
    kernels.clamped_swiglu_kernel(team.control, gate, up, out)


def softplus_gate(gate: Floats, x: Floats, team: ThreadTeam = ALONE) -> None:
    """``x = x * ln(1 + exp(gate))``, in place.

    gate   [n_rows, n_gates]; x [n_rows, n], each gate for n / n_gates elements, one after another
    """
    if gate.ndim != 2 or x.ndim != 2 or not gate.shape[1] or x.shape[1] % gate.shape[1]:
        raise KernelArgumentError(f"gate {gate.shape} for x {x.shape}: as many elements for each gate needed")
    _check("gate", gate, (len(x), gate.shape[1]))
    _check("x", x, x.shape)
    kernels.softplus_gate_kernel(team.control, gate, x)


def sigmoid_mul(x: Floats, gate: Floats, team: ThreadTeam = ALONE) -> None:
    """``x = x / (1 + exp(-gate))``, in place."""
    _check("x", x, x.shape)
    _check("gate", gate, x.shape)
    kernels.sigmoid_mul_kernel(team.control, x, gate)


def scale_in_place(x: Floats, factor: float, team: ThreadTeam = ALONE) -> None:
    """``x = x * factor``, the factor rounded to float32."""
    _check("x", x, x.shape)
    kernels.scale_kernel(team.control, x, np.float32(factor))


def softcap(x: Floats, cap: float, team: ThreadTeam = ALONE) -> None:
    """``x = cap * tanh(x / cap)``, in place; ``cap`` above 0."""
    _check("x", x, x.shape)
    kernels.softcap_kernel(team.control, x, np.float32(cap))


def add_in_place(x: Floats, y: Floats, team: ThreadTeam = ALONE) -> None:
    """``x = x + y`` for arrays of one shape."""
    _check("x", x, x.shape)
    _check("y", y, x.shape)
    kernels.add_kernel(team.control, x, y)


def add_bias(x: Floats, bias: Floats, team: ThreadTeam = ALONE) -> None:
    """``x = x + bias`` for each row; x [n_rows, n], bias [n]."""
    if x.ndim != 2:
        raise KernelArgumentError(f"x must be [n_rows, n], got {x.shape}")
    _check("x", x, x.shape)
    _check("bias", bias, x.shape[1:])
    kernels.add_bias_kernel(team.control, x, bias)


def _check(name: str, array: Floats, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
        layout = "contiguous" if array.flags.c_contiguous else "not contiguous"
        raise KernelArgumentError(
            f"{name} must be contiguous float32 {shape}, got {array.dtype} {array.shape}, {layout}"
        )
