"""Files of random weights in real models' shapes are files that the reader takes, with the layers they are made for."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache
from kvs_core.recurrent_shape import RecurrentShape
from scripts.make_shape import SHAPES, tensors, write_shape
from tests.plan.shapes import LARGE_RECURRENT

SMALL = {"n_embd": 256, "n_ff": 512, "n_vocab": 320, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_rot": 64}
SMALL_EXPERTS = {"attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 32}
SMALL_EXPERTS |= {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}
SMALL_STATE = {"ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2}


@pytest.mark.parametrize("weight_type", [Q.Q4_K, Q.Q8_0], ids=lambda weight_type: weight_type.name)
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_copy_of_each_shape_is_read_as_such(name: str, weight_type: Q, tmp_path: Path) -> None:
    shape = replace(SHAPES[name], **SMALL)  # type: ignore[arg-type]
    if shape.architecture == "qwen35":
        shape = replace(shape, keys=shape.keys | SMALL_STATE)
    if shape.architecture == "gemma4":
        shape = replace(shape, n_head=8, keys=shape.keys | SMALL_EXPERTS)
    path = tmp_path / "shape.gguf"
    write_shape(path, shape, 8, weight_type)
    with open_model(path) as model_file:
        read = read_model_shape(model_file)
        last = model_file.tensor_bytes("blk.7.ffn_gate.weight")
    caches = [layer.cache for layer in read.layers]
    assert [cache is LayerCache.RECURRENT for cache in caches] == [name == "27b" and idx % 4 != 3 for idx in range(8)]
    assert [cache is LayerCache.WINDOW_KV for cache in caches] == [name == "26b-a4b" and idx != 5 for idx in range(8)]
    assert (read.n_embd, read.n_vocab, read.layers[5 if name == "26b-a4b" else 3].head_dim_k) == (256, 320, 64)
    assert np.array_equal(last[: last.size // 2], last[last.size // 2 :])  # one strip of rows twice, a scale in each
    assert np.count_nonzero(last) > 0.9 * last.size


def test_the_27b_shape_has_the_recurrent_sizes_that_plans_are_tested_with() -> None:
    keys = SHAPES["27b"].keys
    sizes = RecurrentShape(
        n_head_k=int(keys["ssm.group_count"]),  # type: ignore[arg-type]
        n_head_v=int(keys["ssm.time_step_rank"]),  # type: ignore[arg-type]
        head_dim=int(keys["ssm.state_size"]),  # type: ignore[arg-type]
        n_taps=int(keys["ssm.conv_kernel"]),  # type: ignore[arg-type]
        groups_values=False,
    )
    assert sizes == LARGE_RECURRENT
    assert keys["ssm.inner_size"] == sizes.n_inner


def test_the_26b_a4b_shape_has_the_sizes_of_the_published_model(tmp_path: Path) -> None:
    """25.2 billion weights, of which a token takes 3.8; layer 5 is the first without a window."""
    shape = SHAPES["26b-a4b"]
    found = {tensor.name: tensor for tensor in tensors(shape, shape.n_layer, Q.Q4_K)}
    n_all = sum(prod(tensor.shape) for tensor in found.values())
    n_experts = sum(prod(tensor.shape) for name, tensor in found.items() if name.endswith("_exps.weight"))
    assert round(n_all / 1e9, 1) == 25.2
    assert round((n_all - n_experts * (128 - 8) / 128) / 1e9, 1) == 3.8
    assert found["blk.5.attn_q.weight"].shape == (16 * 512, 2816)
    assert "blk.5.attn_v.weight" not in found
    assert found["blk.4.attn_v.weight"].shape == (8 * 256, 2816)
    assert {found[f"blk.{idx}.ffn_down_exps.weight"].weight_type for idx in range(30)} == {Q.Q5_0, Q.Q8_0}
