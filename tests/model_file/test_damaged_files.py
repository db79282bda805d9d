"""Truncated files (U01), absurd lengths (U03), alignment (U04), tensor types (U07): a valid file with one change."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvs_core.errors import ModelFileError
from kvs_core.model_file import open_model
from tests.fixtures.gguf_bytes import (
    Q4_0,
    Q8_0,
    GgufBytes,
    Tensor,
    Value,
    boolean,
    f32,
    i32,
    number,
    numbers,
    raw_string,
    string,
    strings,
    tiny_llama,
    u16,
    u32,
)
from tests.fixtures.refusals import refused_open

HUGE = 1 << 63
MAX_PEAK_BYTES = 2 << 20  # of Python and numpy memory, for refusing a file of at most a hundred kilobytes
DOWN = "blk.0.ffn_down.weight"


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    """Where a test writes its file; fails the test if refusing it took memory in proportion to a claimed length."""
    tracemalloc.start()
    yield tmp_path / "model.gguf"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


def write(path: Path, file: GgufBytes | bytes) -> Path:
    path.write_bytes(file if isinstance(file, bytes) else file.build())
    return path


def test_a_file_cut_at_60_percent_names_the_first_tensor_that_does_not_fit(model: Path) -> None:
    content = tiny_llama().build()
    n_present = len(content) * 6 // 10
    write(model, content[:n_present])
    with open_model(write(model.with_name("whole.gguf"), content)) as whole:
        first = next(t for t in whole.tensors.values() if t.file_offset + t.n_bytes > n_present)
    refused_open(
        model,
        "model.gguf",
        f"tensor {first.name} ",
        "does not fit",
        f"needs {first.n_bytes} bytes at byte {first.file_offset}",
        f"the file has {n_present} bytes of the {len(content)}",
        key=first.name,
    )


def test_the_last_byte_missing_is_noticed(model: Path) -> None:
    content = tiny_llama().build()
    refused_open(write(model, content[:-1]), "tensor output.weight", "does not fit", key="output.weight")


def test_a_file_cut_in_its_header_is_refused_wherever_the_cut_is(model: Path) -> None:
    file = tiny_llama(n_layer=1, n_vocab=3)
    content = file.build()
    table_end = content.rindex(b"output.weight") + len(b"output.weight") + 4 + 16 + 4 + 8
    for n_present in range(4, table_end, 7):
        refused_open(write(model, content[:n_present]), f"the file ends at byte {n_present}")
    error = refused_open(write(model, content[:table_end]), "does not fit", key="token_embd.weight")
    assert error.hint
    assert "incomplete" in error.hint


def test_a_last_string_one_byte_short_is_refused(model: Path) -> None:
    file = GgufBytes(keys=(("x.y", strings(["abc", "def"])),), alignment=1)
    with open_model(write(model, file)) as model_file:
        assert model_file.metadata["x.y"] == ["abc", "def"]
    refused_open(write(model, file.build()[:-1]), "string 1 of 2 of metadata key x.y", "the file ends at byte")


def test_a_cut_in_the_tensor_table_names_the_tensor(model: Path) -> None:
    content = tiny_llama().build()
    cut = content.index(b"blk.1.attn_k.weight") + len("blk.1.attn_k.weight") + 2
    refused_open(write(model, content[:cut]), "n_dims of tensor blk.1.attn_k.weight", f"ends at byte {cut}")


@pytest.mark.parametrize("name", ["m.gguf-split-a", "m.gguf.part1of2", "m.part-0000"])
def test_a_raw_piece_of_a_file_gets_the_hint_to_join_the_pieces(tmp_path: Path, name: str) -> None:
    content = tiny_llama().build()
    error = refused_open(write(tmp_path / name, content[: len(content) - 4]), "does not fit", key="output.weight")
    assert error.hint
    assert "join all pieces" in error.hint


@pytest.mark.parametrize("offset", [HUGE, (1 << 64) - 32, (1 << 64) - 4096])
def test_an_offset_near_the_end_of_64_bits_does_not_fit(model: Path, offset: int) -> None:
    file = tiny_llama().with_tensor("output.weight", offset=offset)
    refused_open(write(model, file), "tensor output.weight", "does not fit", key="output.weight")


@pytest.mark.parametrize(
    ("version", "fragments"),
    [
        (0, ["version 0 is not supported", "2 and 3"]),
        (1, ["version 1 is not supported", "2 and 3"]),
        (4, ["version 4 is not supported", "2 and 3"]),
        (99, ["version 99 is not supported", "2 and 3"]),
        (2**32 - 1, ["version 4294967295 is not supported"]),
        (3 << 24, ["big-endian GGUF (version 3)"]),
        (2 << 24, ["big-endian GGUF (version 2)"]),
    ],
)
def test_other_versions_and_byte_orders_are_refused_by_name(model: Path, version: int, fragments: list[str]) -> None:
    refused_open(write(model, replace(tiny_llama(), version=version)), *fragments)


def test_a_whole_big_endian_file_is_recognised(model: Path) -> None:
    content = b"GGUF" + struct.pack(">IQQ", 3, 0, 1) + struct.pack(">Q", 1) + b"x" + struct.pack(">II", 4, 7)
    refused_open(write(model, content), "big-endian", "little-endian")


@pytest.mark.parametrize("count", [HUGE, (1 << 64) - 1, 1 << 32, 100_000])
def test_absurd_counts_name_their_field(model: Path, count: int) -> None:
    refused_open(write(model, replace(tiny_llama(), n_keys=count)), f"a metadata key count of {count}")
    refused_open(write(model, replace(tiny_llama(), n_tensors=count)), f"a tensor count of {count}")


def test_a_count_one_too_high_or_too_low_is_refused(model: Path) -> None:
    file = GgufBytes(keys=(("a", u32(1)), ("b", u32(2))), tensors=(Tensor(name="t", shape=(8,)),))
    for off_by_one in (
        replace(file, n_keys=1),
        replace(file, n_keys=3),
        replace(file, n_tensors=2),
    ):
        refused_open_any(write(model, off_by_one))


def refused_open_any(path: Path) -> None:
    """Refused with any key: what exactly goes wrong depends on which bytes are taken for what."""
    with pytest.raises(ModelFileError, match=r"model\.gguf") as caught, open_model(path):
        pass
    refused_open(path, key=caught.value.key)


@pytest.mark.parametrize("length", [HUGE, (1 << 64) - 1, 70_000])
def test_absurd_key_and_name_lengths_name_their_field(model: Path, length: int) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", length) + bytes(64)
    refused_open(write(model, head), "the name of metadata key 0 of 1", str(length))
    table = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", length) + bytes(64)
    refused_open(write(model, table), "the name of tensor 0 of 1", str(length))


@pytest.mark.parametrize("length", [HUGE, (1 << 64) - 1, 1 << 40, 1 << 20])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda length: strings(["a"], count=length), id="strings"),
        pytest.param(lambda length: numbers(0, [1], count=length), id="bytes"),
        pytest.param(lambda length: numbers(12, [1.0], count=length), id="doubles"),
        pytest.param(lambda length: numbers(7, [1], count=length), id="flags"),
        pytest.param(lambda length: Value(8, struct.pack("<Q", length) + b"abc"), id="string"),
        pytest.param(
            lambda length: Value(9, struct.pack("<IQ", 8, 2) + raw_string(b"a") + struct.pack("<Q", length)),
            id="string-in-array",
        ),
    ],
)
def test_absurd_value_lengths_name_their_key(model: Path, make: object, length: int) -> None:
    assert callable(make)
    file = tiny_llama().with_key("x.y", make(length))
    refused_open(write(model, file), "metadata key x.y", "the file ends at byte")


def test_a_nested_array_is_refused(model: Path) -> None:
    nested = Value(9, struct.pack("<IQ", 9, 1) + struct.pack("<IQI", 4, 1, 7))
    refused_open(write(model, tiny_llama().with_key("x.y", nested)), "x.y", "array of arrays", key="x.y")


@pytest.mark.parametrize("type_id", [13, 255, 2**32 - 1])
def test_an_unknown_value_type_is_refused(model: Path, type_id: int) -> None:
    file = tiny_llama().with_key("x.y", Value(type_id, b""))
    refused_open(write(model, file), "x.y", f"unknown value type {type_id}", "8 string", key="x.y")
    array = tiny_llama().with_key("x.y", Value(9, struct.pack("<IQ", type_id, 1)))
    refused_open(write(model, array), "x.y", f"unknown value type {type_id}", key="x.y")


def test_a_boolean_that_is_neither_is_refused(model: Path) -> None:
    refused_open(write(model, tiny_llama().with_key("x.y", number(7, 2))), "x.y", "boolean of value 2", key="x.y")
    array = tiny_llama().with_key("x.y", numbers(7, [1, 7]))
    refused_open(write(model, array), "x.y", "boolean of value 7", key="x.y")


def test_duplicates_are_refused(model: Path) -> None:
    file = tiny_llama()
    twice = replace(file, keys=(*file.keys, ("llama.block_count", u32(2))))
    refused_open(write(model, twice), "key llama.block_count appears twice", key="llama.block_count")
    again = replace(file, tensors=(*file.tensors, file.tensors[0]))
    refused_open(write(model, again), "tensor token_embd.weight appears twice", key="token_embd.weight")


def test_names_that_are_not_utf8_are_refused(model: Path) -> None:
    content = tiny_llama().build()
    refused_open(write(model, content.replace(b"general.name", b"general.\xff\xfe__")), "key 2 of", "is not UTF-8")
    damaged = content.replace(b"output_norm.weight", b"output_norm.\xffeight")
    refused_open(write(model, damaged), "the name of tensor 19 of 21", "is not UTF-8")


@pytest.mark.parametrize("n_dims", [0, 5, 255, 2**32 - 1])
def test_n_dims_out_of_range_is_refused(model: Path, n_dims: int) -> None:
    file = tiny_llama().with_tensor(DOWN, n_dims=n_dims)
    refused_open(write(model, file), f"tensor {DOWN} has n_dims {n_dims}", "1 to 4", key=DOWN)


@pytest.mark.parametrize("shape", [(1 << 32, 1 << 32), (1 << 63, 1 << 63, 1 << 63, 1 << 63), (64, 0), (0,), (HUGE,)])
def test_dims_whose_product_overflows_are_refused(model: Path, shape: tuple[int, ...]) -> None:
    file = tiny_llama().with_tensor(DOWN, shape=shape, data=b"")
    dims = " x ".join(str(dim) for dim in shape)
    refused_open(write(model, file), f"tensor {DOWN} has dims {dims}", key=DOWN)


def test_dims_just_below_the_overflow_do_not_fit(model: Path) -> None:
    file = tiny_llama().with_tensor(DOWN, shape=((1 << 31) - 1, (1 << 32) - 1), data=b"")
    refused_open(
        write(model, file), f"tensor {DOWN}", "does not fit", str(4 * ((1 << 31) - 1) * ((1 << 32) - 1)), key=DOWN
    )


@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        pytest.param(i32(32), "stored as int32; uint32 needed", id="int32"),
        pytest.param(number(10, 32), "stored as uint64", id="uint64"),
        pytest.param(u16(32), "stored as uint16", id="uint16"),
        pytest.param(f32(32.0), "stored as float32", id="float32"),
        pytest.param(string("32"), "stored as string", id="string"),
        pytest.param(boolean(True), "stored as bool", id="bool"),
        pytest.param(numbers(4, [32]), "stored as array", id="array"),
        pytest.param(u32(0), "is 0; a power of two", id="0"),
        pytest.param(u32(3), "is 3; a power of two", id="3"),
        pytest.param(u32(4), "is 4; a power of two, 8 or more", id="4"),
        pytest.param(u32(48), "is 48; a power of two", id="48"),
        pytest.param(u32(1 << 31), "2147483648 puts the tensor data at byte", id="2^31"),
    ],
)
def test_an_unusable_alignment_is_refused(model: Path, value: Value, fragment: str) -> None:
    file = tiny_llama().with_key("general.alignment", value)
    error = refused_open(write(model, file), "general.alignment", fragment, key="general.alignment")
    if "the file ends at" not in str(error):
        assert "damaged" not in (error.hint or ""), "the file is whole; its writer was wrong"


def test_an_alignment_the_data_does_not_have_is_refused(model: Path) -> None:
    file = GgufBytes(
        keys=(("general.alignment", u32(64)),), tensors=(Tensor(name="a", shape=(8,)), Tensor(name="b", shape=(8,)))
    )
    refused_open(write(model, replace(file, alignment=32)), "tensor b", "general.alignment 64", key="b")


def test_overlapping_tensors_are_refused(model: Path) -> None:
    file = GgufBytes(tensors=(Tensor(name="a", shape=(32,)), Tensor(name="b", shape=(32,), offset=64)))
    refused_open(write(model, file), "tensor b", "overlaps", "tensor a ends", key="b")


def test_two_tensors_at_one_place_are_refused(model: Path) -> None:
    file = GgufBytes(tensors=(Tensor(name="a", shape=(32,)), Tensor(name="b", shape=(32,), offset=0)))
    refused_open(write(model, file), "tensor b", "overlaps", key="b")


def test_a_gap_between_tensors_is_refused(model: Path) -> None:
    file = GgufBytes(tensors=(Tensor(name="a", shape=(32,)), Tensor(name="b", shape=(8,), offset=160)))
    refused_open(write(model, file.build() + bytes(64)), "tensor b", "leaves a gap", key="b")
    first = GgufBytes(tensors=(Tensor(name="a", shape=(8,), offset=32),))
    refused_open(write(model, first.build() + bytes(64)), "tensor a", "the tensor data begins", key="a")


@pytest.mark.parametrize("type_id", [4, 5, 9, 15, 36, 42, 9999])
def test_an_unknown_tensor_type_is_refused_with_the_known_ones(model: Path, type_id: int) -> None:
    file = tiny_llama().with_tensor(DOWN, type_id=type_id, data=bytes(64 * 96 * 4))
    refused_open(write(model, file), f"tensor {DOWN} has the unknown type {type_id}", "2 Q4_0", "14 Q6_K", key=DOWN)


def test_a_type_that_makes_the_tensor_smaller_than_its_place_is_noticed(model: Path) -> None:
    # Type 39 is known, but these bytes are float32: only the size of the hole gives it away.
    file = tiny_llama().with_tensor(DOWN, type_id=39, data=bytes(64 * 96 * 4))
    refused_open(write(model, file), f"tensor {DOWN} ends", "leaves a gap", key="blk.1.attn_norm.weight")


@pytest.mark.parametrize(("type_id", "name"), [(Q4_0, "Q4_0"), (Q8_0, "Q8_0"), (12, "Q4_K")])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(model: Path, type_id: int, name: str) -> None:
    file = tiny_llama().with_tensor(DOWN, type_id=type_id, shape=(40, 64), data=bytes(4096))
    refused_open(write(model, file), f"tensor {DOWN} has rows of 40 elements", name, "a multiple of", key=DOWN)


@pytest.mark.parametrize(("kind", "what"), [("adapter", "LoRA"), ("mmproj", "projector"), ("imatrix", "importance")])
def test_files_that_are_no_model_are_refused_by_kind(model: Path, kind: str, what: str) -> None:
    file = tiny_llama().with_key("general.type", string(kind)).without_key("llama.context_length")
    refused_open(write(model, file), what, f"general.type {kind}", key="general.type")


def test_limits_hold_where_a_file_is_large_enough_for_absurd_lengths(model: Path) -> None:
    for value, fragment in (
        (strings([], count=1 << 23), f"{(1 << 23) + 11} strings"),
        (strings([], count=1 << 40), "the file ends at byte"),
        (numbers(0, [], count=1 << 33), "longer than"),
        (Value(8, struct.pack("<Q", 1 << 33)), "longer than"),
    ):
        write(model, replace(GgufBytes(), keys=(*(("k" + str(idx), string("")) for idx in range(5)), ("x.y", value))))
        os.truncate(model, 16 << 30)  # sparse: takes no room
        refused_open(model, "metadata key x.y", fragment)
