"""Files of random weights in real models' shapes are files that the reader takes, with the layers they are made for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Q

from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.model_shape import LayerCache
from kvs_core.recurrent_shape import RecurrentShape
from scripts.make_shape import SHAPES, write_shape
from tests.plan.shapes import LARGE_RECURRENT

SMALL = {"n_embd": 256, "n_ff": 512, "n_vocab": 320, "n_head": 4, "n_head_kv": 2, "head_dim": 64, "n_rot": 64}
SMALL_STATE = {"ssm.inner_size": 256, "ssm.state_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2}


@pytest.mark.parametrize("weight_type", [Q.Q4_K, Q.Q8_0], ids=lambda weight_type: weight_type.name)
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_copy_of_each_shape_is_read_as_such(name: str, weight_type: Q, tmp_path: Path) -> None:
    shape = replace(SHAPES[name], **SMALL)  # type: ignore[arg-type]
    if shape.architecture == "qwen35":
        shape = replace(shape, keys=shape.keys | SMALL_STATE)
    path = tmp_path / "shape.gguf"
    write_shape(path, shape, 4, weight_type)
    with open_model(path) as model_file:
        read = read_model_shape(model_file)
    recurs = [layer.cache is LayerCache.RECURRENT for layer in read.layers]
    assert recurs == [name == "27b" and layer_idx != 3 for layer_idx in range(4)]
    assert (read.n_embd, read.n_vocab, read.layers[3].head_dim_k) == (256, 320, 64)


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
