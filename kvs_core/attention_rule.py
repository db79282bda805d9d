"""How the scores of one layer's attention are made, beside the queries and keys themselves. Plain values, no arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRule:
    """``score = cap(scale * q . k)`` for the keys a token sees.

    scale     factor of the product of query and key
    n_swa     a token sees the last ``n_swa`` positions, its own included; 0: every earlier one
    softcap   above 0: ``cap(s) = softcap * tanh(s / softcap)``; 0: ``cap(s) = s``
    """

    scale: float
    n_swa: int = 0
    softcap: float = 0.0
