"""Files that open: what the parser returns is what was written, and what gguf's own reader returns."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader

from kvs_core.errors import ModelFileError, StateError
from kvs_core.gguf_header import MetadataValue
from kvs_core.model_file import ModelFile, open_model
from tests.fixtures.gguf_bytes import (
    Q4_1,
    Q8_0,
    GgufBytes,
    Tensor,
    boolean,
    f32,
    number,
    numbers,
    string,
    strings,
    tiny_llama,
    u32,
)
from tests.fixtures.tiny_models import TinyModel, write_model


def write(path: Path, file: GgufBytes | bytes) -> Path:
    path.write_bytes(file if isinstance(file, bytes) else file.build())
    return path


def assert_same_value(ours: MetadataValue, theirs: object) -> None:
    if isinstance(ours, np.ndarray):
        np.testing.assert_array_equal(ours, np.asarray(theirs))
        assert not ours.flags.writeable
    elif isinstance(ours, float):
        assert isinstance(theirs, float)
        assert ours == theirs or (np.isnan(ours) and np.isnan(theirs))
    else:
        assert type(ours) is type(theirs)
        assert ours == theirs


def assert_same_as_reader(model_file: ModelFile, reader: GGUFReader) -> None:
    theirs = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert list(model_file.metadata) == list(theirs)
    for name, field in theirs.items():
        assert_same_value(model_file.metadata[name], field.contents())
    assert list(model_file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = model_file.tensors[tensor.name]
        assert ours.type == tensor.tensor_type
        assert ours.shape == tuple(tensor.shape.tolist())
        assert (ours.n_elements, ours.n_bytes) == (tensor.n_elements, tensor.n_bytes)
        assert ours.file_offset == tensor.data_offset
        np.testing.assert_array_equal(
            model_file.tensor_bytes(tensor.name), np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8)
        )


def test_every_field_of_a_built_file_is_read(tmp_path: Path) -> None:
    file = (
        tiny_llama()
        .with_key("x.u8", number(0, 255))
        .with_key("x.i8", number(1, -128))
        .with_key("x.u16", number(2, 65535))
        .with_key("x.i16", number(3, -32768))
        .with_key("x.u32", number(4, 2**32 - 1))
        .with_key("x.i32", number(5, -(2**31)))
        .with_key("x.f32", number(6, 0.1))
        .with_key("x.nan", number(6, float("nan")))
        .with_key("x.u64", number(10, 2**64 - 1))
        .with_key("x.i64", number(11, -(2**63)))
        .with_key("x.f64", number(12, 0.1))
        .with_key("x.flag", boolean(False))
        .with_key("x.empty", string(""))
        .with_key("x.newline", string("a\nb\0c"))
        .with_key("x.names", strings(["", "é", "模型", "a b"]))
        .with_key("x.no_names", strings([]))
        .with_key("x.flags", numbers(7, [1, 0, 1]))
        .with_key("x.doubles", numbers(12, [0.5, -1e300]))
        .with_key("x.bytes", numbers(0, range(256)))
        .with_key("x.no_numbers", numbers(5, []))
        .with_key("x.wide", numbers(10, [2**64 - 1]))
        .with_tensor("blk.0.ffn_down.weight", type_id=Q8_0)
        .with_tensor("blk.1.ffn_up.weight", type_id=Q4_1)
    )
    path = write(tmp_path / "m.gguf", file)
    with open_model(path) as model_file:
        assert model_file.metadata["x.f32"] == float(np.float32(0.1))
        assert model_file.metadata["x.no_names"] == []
        assert model_file.metadata["x.flag"] is False
        flags = model_file.metadata["x.flags"]
        assert isinstance(flags, np.ndarray)
        assert flags.dtype == np.bool_
        assert model_file.metadata["general.name"] == "tiny é 模型"
        assert_same_as_reader(model_file, GGUFReader(str(path)))


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_a_file_of_the_gguf_writer_is_read(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "ü"])
    writer.add_array("tokenizer.ggml.scores", [0.25, 0.5, 1.0])
    writer.add_float64("x.f64", 1 / 3)
    rng = np.random.default_rng(1)
    for name, kind in (("a", "F32"), ("b", "Q4_0"), ("c", "Q8_0"), ("d", "BF16"), ("e", "F16")):
        values = rng.standard_normal((3, 64), dtype=np.float32)
        type_ = GGMLQuantizationType[kind]
        data = values if kind == "F32" else gguf.quants.quantize(values, type_)
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_model(path) as model_file:
        assert_same_as_reader(model_file, GGUFReader(str(path)))
        assert model_file.tensors["b"].row_bytes == 2 * 18
        assert model_file.tensors["b"].n_rows == 3


@pytest.mark.slow  # gguf's reader needs seconds for the vocabulary
def test_smollm2_is_read_as_the_gguf_reader_reads_it(smollm2: Path) -> None:
    with open_model(smollm2) as model_file:
        assert_same_as_reader(model_file, GGUFReader(str(smollm2)))
        assert model_file.file_bytes == smollm2.stat().st_size


def test_released_pages_leave_memory_and_are_read_again(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "large.gguf", TinyModel(n_layer=2, n_embd=512, n_ff=4096, weight_type=GGMLQuantizationType.F32)
    )
    with open_model(path) as model:
        before = resident_bytes()
        texts = {name: bytes(model.tensor_bytes(name)[::512]) for name in model.tensors}
        assert resident_bytes() > before + model.file_bytes // 2
        model.release_pages()
        assert resident_bytes() < before + model.file_bytes // 4
        assert texts == {name: bytes(model.tensor_bytes(name)[::512]) for name in model.tensors}


def resident_bytes() -> int:
    """File pages that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssFile")).split()[1])


def test_version_2_is_read_as_version_3_is(tmp_path: Path) -> None:
    with (
        open_model(write(tmp_path / "2.gguf", replace(tiny_llama(), version=2))) as older,
        open_model(write(tmp_path / "3.gguf", tiny_llama())) as newer,
    ):
        assert dict(older.tensors) == dict(newer.tensors)
        assert list(older.metadata) == list(newer.metadata)


def test_string_bytes_that_are_not_utf8_are_kept(tmp_path: Path) -> None:
    raw = b"\xe6\xad"
    path = write(tmp_path / "m.gguf", tiny_llama().with_key("x", string(raw.decode("utf-8", "surrogateescape"))))
    with open_model(path) as model_file:
        value = model_file.metadata["x"]
        assert isinstance(value, str)
        assert value.encode("utf-8", "surrogateescape") == raw


@pytest.mark.parametrize("alignment", [8, 16, 32, 64, 4096])
def test_a_declared_alignment_moves_the_data(tmp_path: Path, alignment: int) -> None:
    # An odd number of floats leaves a gap after every norm, so a wrong alignment would read a neighbour's bytes.
    odd = GgufBytes(
        keys=(("general.alignment", u32(alignment)),),
        tensors=tuple(
            Tensor(name=f"t{idx}", shape=(5,), data=np.full(5, idx, np.float32).tobytes()) for idx in range(4)
        ),
        alignment=alignment,
    )
    with open_model(write(tmp_path / "m.gguf", odd)) as model_file:
        for idx in range(4):
            assert model_file.tensors[f"t{idx}"].file_offset % alignment == 0
            np.testing.assert_array_equal(model_file.tensor_bytes(f"t{idx}").view(np.float32), np.float32(idx))


def test_a_table_in_another_order_than_the_data_is_read(tmp_path: Path) -> None:
    file = GgufBytes(
        tensors=(
            Tensor(name="second", shape=(8,), offset=32, data=np.full(8, 1, np.float32).tobytes()),
            Tensor(name="first", shape=(8,), offset=0, data=np.full(8, 2, np.float32).tobytes()),
        )
    )
    with open_model(write(tmp_path / "m.gguf", file)) as model_file:
        # The builder writes data in table order; only the offsets are swapped.
        assert model_file.tensor_bytes("first").view(np.float32)[0] == 1
        assert model_file.tensor_bytes("second").view(np.float32)[0] == 2


def test_missing_padding_after_the_last_tensor_is_no_loss(tmp_path: Path) -> None:
    file = GgufBytes(tensors=(Tensor(name="a", shape=(5,)),))
    content = file.build()
    path = write(tmp_path / "m.gguf", content[: len(content) - 12])
    with open_model(path) as model_file:
        assert model_file.tensor_bytes("a").size == 20


def test_a_file_without_tensors_opens(tmp_path: Path) -> None:
    path = write(tmp_path / "vocab.gguf", GgufBytes(keys=(("general.type", string("model")), ("x", f32(1.0)))))
    with open_model(path) as model_file:
        assert dict(model_file.tensors) == {}


def test_tensor_bytes_are_read_only_and_not_copied(tmp_path: Path) -> None:
    with open_model(write(tmp_path / "m.gguf", tiny_llama())) as model_file:
        view = model_file.tensor_bytes("token_embd.weight")
        assert view.dtype == np.uint8
        assert view.shape == (64 * 20 * 4,)
        assert not view.flags.writeable
        assert not view.flags.owndata
        assert np.shares_memory(view, model_file.tensor_bytes("token_embd.weight"))


def test_what_a_model_file_says_cannot_be_changed(tmp_path: Path) -> None:
    with open_model(write(tmp_path / "m.gguf", tiny_llama())) as model_file:
        with pytest.raises(TypeError):
            model_file.metadata["x"] = 1  # type: ignore[index]
        with pytest.raises(FrozenInstanceError):
            model_file.tensors["token_embd.weight"].n_bytes = 0  # type: ignore[misc]


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    with open_model(write(tmp_path / "m.gguf", tiny_llama())) as model_file:
        with pytest.raises(ModelFileError, match="no tensor blk\\.9\\.nothing") as caught:
            model_file.tensor_bytes("blk.9.nothing")
        assert caught.value.key == "blk.9.nothing"


def test_closing_twice_is_fine_and_ends_access(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny_llama())
    model_file = open_model(path)
    view = model_file.tensor_bytes("output_norm.weight")
    model_file.close()
    model_file.close()
    with pytest.raises(StateError, match="was closed"):
        model_file.tensor_bytes("output_norm.weight")
    assert view.view(np.float32)[0] == -0.5  # the view keeps its mapping
    assert "llama.block_count" in model_file.metadata


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's own table of mappings")
def test_the_mapping_ends_with_the_last_view(tmp_path: Path) -> None:
    path = write(tmp_path / "only-here.gguf", tiny_llama())
    gc.collect()  # what earlier tests left behind
    n_open = len(os.listdir("/proc/self/fd"))
    model_file = open_model(path)
    view = model_file.tensor_bytes("output_norm.weight")
    model_file.close()
    assert path.name in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert path.name not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == n_open
