"""Plans and counters as JSON-ready dictionaries; docs/command-line.md and docs/kv-stream.md document every key."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kvs_core.kv_cache import StreamCounters
from kvs_core.phase import Phase
from kvs_core.plan import RunPlan
from kvs_core.policy import Layout
from kvs_core.units import MIB

SCHEMA_VERSION = 1


def plan_to_json(plan: RunPlan) -> dict[str, Any]:
    """Every number of a plan; sizes in bytes unless the key says MiB."""
    prediction = plan.prediction()
    return {
        "device": {
            "kind": plan.budget.kind.value,
            "name": plan.budget.name,
            "total_bytes": plan.budget.total_bytes,
            "free_bytes": plan.budget.free_bytes,
            "host_free_bytes": plan.budget.host_free_bytes,
            "n_threads": plan.budget.n_threads,
        },
        "model": {
            "architecture": plan.shape.architecture,
            "name": plan.shape.name,
            "n_layer": plan.shape.n_layer,
            "n_vocab": plan.shape.n_vocab,
            "n_ctx_train": plan.shape.n_ctx_train,
        },
        "n_ctx": plan.n_ctx,
        "n_batch": plan.n_batch,
        "n_ubatch": plan.n_ubatch,
        "type_k": plan.config.type_k.value,
        "type_v": plan.config.type_v.value,
        "layers_of_types": dict(plan.layers_of_types()),
        "kv_rotate": bool(plan.rotations()),
        "page_tokens": plan.cache.page_tokens,
        "pages_per_layer": plan.cache.n_pages,
        "kv_layers": plan.cache.n_layers,
        "page_bytes": sorted(set(plan.cache.page_bytes)),
        "kv_bytes": plan.kv_bytes,
        "window_layers": len(plan.window_layers),
        "window_bytes": plan.window_bytes,
        "recurrent_layers": len(plan.recurrent_layers),
        "recurrent_bytes": plan.recurrent_bytes,
        "weights_bytes": plan.weights_bytes,
        "device_bytes": plan.device_bytes,
        "device_context_bytes": plan.context_bytes,
        "process_bytes": plan.process_bytes,
        "host_context_bytes": plan.host_context_bytes,
        "host_store_bytes": plan.store_bytes,
        "host_store_path": None if plan.config.store_path is None else str(plan.config.store_path),
        "streams": plan.streams,
        "minimum_arena_mib": plan.minimum_arena_bytes // MIB,
        "useful_arena_mib": plan.useful_arena_bytes // MIB,
        "arena": {
            "mode": plan.config.arena.mode.value,
            "requested_bytes": plan.arena_requested_bytes,
            "allocated_bytes": plan.arena_bytes,
            "store_table_bytes": plan.table_bytes,
            **{phase.value: _layout_to_json(plan.layout(phase)) for phase in Phase},
        },
        "kernels": dict(plan.kernels()),
        "predicted": {
            "prompt_streamed_bytes": prediction.prompt_bytes,
            "decode_step_streamed_bytes": prediction.decode_step_bytes,
        },
    }


def counters_to_json(counters: StreamCounters) -> dict[str, int]:
    """The streaming counters by name."""
    return asdict(counters)


def _layout_to_json(layout: Layout) -> dict[str, Any]:
    pages = layout.cache.n_pages
    return {
        "resident_bytes": layout.resident_bytes,
        "ring_bytes": layout.ring_bytes,
        "state_bytes": layout.state_bytes,
        "workspace_bytes": layout.workspace_bytes,
        "unused_bytes": layout.unused_bytes,
        "resident_pages_min": min(layout.resident_pages, default=0),
        "resident_pages_max": max(layout.resident_pages, default=0),
        "streamed_pages_max": pages - min(layout.resident_pages, default=pages),
        "tail_bytes": layout.tail_bytes,
        "fresh_bytes": layout.fresh_bytes,
    }
