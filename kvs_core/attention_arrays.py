"""Workspace arrays of attention, beside what the model's own file names: running sums, and heads padded for the cache.

Integers only. Which heads are padded follows from the cache types, see ``KvType.cached_head_dim``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvs_core.kv_types import PageGeometry
from kvs_core.model_shape import LayerShape
from kvs_core.workspace import ArraySpec


def attention_arrays(layers: Sequence[tuple[LayerShape, PageGeometry]], n_tokens: int) -> list[ArraySpec]:
    """What ``Session`` and the operations need to attend with each of ``layers`` for up to ``n_tokens`` tokens.

    ``q_padded``, ``k_padded``, ``v_padded`` and ``attended_padded`` exist only if some layer's heads are padded.
    """
    out_dim = max((layer.n_head * geometry.head_dim_v for layer, geometry in layers), default=0)
    n_head = max((layer.n_head for layer, _ in layers), default=0)
    padded_k = [pair for pair in layers if pair[1].head_dim_k != pair[0].head_dim_k]
    padded_v = [pair for pair in layers if pair[1].head_dim_v != pair[0].head_dim_v]
    widths = {
        "attention_acc": out_dim,
        "attention_max": n_head,
        "attention_sum": n_head,
        "q_padded": max((layer.n_head * geometry.head_dim_k for layer, geometry in padded_k), default=0),
        "k_padded": max((layer.n_head_kv * geometry.head_dim_k for layer, geometry in padded_k), default=0),
        "v_padded": max((layer.n_head_kv * geometry.head_dim_v for layer, geometry in padded_v), default=0),
        "attended_padded": max((layer.n_head * geometry.head_dim_v for layer, geometry in padded_v), default=0),
    }
    return [ArraySpec(name=name, shape=(n_tokens, width)) for name, width in widths.items() if width]
