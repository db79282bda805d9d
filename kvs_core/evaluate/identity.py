"""Who a model and a vocabulary are, and how a cache is kept, as short text for base files and for going on with a run.

No tensor is interpreted here; a model is its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvs_core.evaluate.partial_file import reporting_os_errors
from kvs_core.evaluate.saved_logits import LogitsIdentity
from kvs_core.plan import RunPlan

_SAMPLE_BYTES = 1 << 20
_N_SAMPLES = 64
_TOKENIZER_KEYS = (
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
)


def fingerprint_files(paths: Iterable[str]) -> str:
    """SHA-256 over the size of every file and up to 64 evenly spaced MiB of it (all of a smaller file), 32 digits.

    Reading a large model as a whole would take longer than many a run; samples tell different models apart, and any
    change of the metadata or of the size.
    """
    digest = hashlib.sha256()
    for path in map(Path, paths):
        with reporting_os_errors(path), path.open("rb") as file:
            n_bytes = file.seek(0, 2)
            digest.update(n_bytes.to_bytes(8, "little"))
            last = max(0, n_bytes - _SAMPLE_BYTES)
            offsets = range(0, n_bytes, _SAMPLE_BYTES)
            if len(offsets) > _N_SAMPLES:
                sampled = [last * sample // (_N_SAMPLES - 1) for sample in range(_N_SAMPLES)]
            else:
                sampled = list(offsets)
            for offset in sampled:
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def fingerprint_tokenizer(metadata: Mapping[str, Any]) -> str:
    """SHA-256 over everything in a model's metadata that decides how text becomes tokens, 32 digits."""
    digest = hashlib.sha256()
    for key in _TOKENIZER_KEYS:
        value = metadata.get(key)
        items = value if isinstance(value, list | np.ndarray) else [value]
        digest.update(f"{key}\n{len(items)}\n".encode())
        for item in items:
            digest.update(repr(item.item() if isinstance(item, np.generic) else item).encode("utf-8", "replace"))
            digest.update(b"\0")
    return digest.hexdigest()[:32]


def identify_logits(plan: RunPlan, *, model: str, tokenizer: str) -> LogitsIdentity:
    """Who makes a run's logits: the two fingerprints, and the cache of ``plan``."""
    config = plan.config
    return LogitsIdentity(
        model=model,
        tokenizer=tokenizer,
        type_k=config.type_k.value,
        type_v=config.type_v.value,
        layer_types=",".join(map(str, config.layer_types)),
        kv_rotate=_rotates(plan),
    )


def _rotates(plan: RunPlan) -> bool | None:
    geometries = [layer.geometry for layer in plan.kv_layers] + [layer.geometry for layer in plan.window_layers]
    types = {kv_type for geometry in geometries for kv_type in (geometry.type_k, geometry.type_v)}
    if not any(kv_type.is_quantised and not kv_type.is_turbo for kv_type in types):
        return None
    rotations = [rotation for pair in plan.rotations().values() for rotation in (pair.keys, pair.values)]
    return any(rotation is not None and not rotation.is_signed for rotation in rotations)
