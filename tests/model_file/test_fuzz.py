"""Any change to a valid file either leaves it valid or is refused with a ModelFileError: nothing else gets out."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvs_core.errors import ModelFileError, UnsupportedError
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from tests.fixtures.gguf_bytes import boolean, f32, numbers, strings, tiny_llama, u16
from tests.fixtures.refusals import check_form

SMALL = (
    tiny_llama(n_layer=1, n_embd=16, n_head=2, n_head_kv=1, n_ff=16, n_vocab=3)
    .with_key("x.flags", numbers(7, [1, 0]))
    .with_key("x.wide", numbers(11, [-1, 2**62]))
    .with_key("x.names", strings(["a", "", "é"]))
    .with_key("x.flag", boolean(True))
    .with_key("split.count", u16(1))
    .with_key("llama.rope.scaling.factor", f32(2.0))
)
CONTENT = SMALL.build()
TABLE_BEGIN = SMALL.table_begin()
HEADER_BYTES = len(CONTENT) - sum(-(-len(tensor.content()) // 32) * 32 for tensor in SMALL.tensors)
MAX_PEAK_BYTES = 4 << 20
# Numbers that sit at the edges of what lengths, counts and types can be.
EDGES = (0, 1, 2, 3, 4, 7, 8, 9, 12, 13, 31, 32, 33, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
WIDE_EDGES = (*EDGES, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)

# The limit is on a single file and generous, for a busy machine; a length that were believed would take minutes.
bounded = settings(
    max_examples=250,
    deadline=5000,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def open_or_refuse(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with open_model(path) as model_file:
            for name in model_file.tensors:
                assert model_file.tensor_bytes(name).size == model_file.tensors[name].n_bytes
            read_model_shape(model_file)
    except (ModelFileError, UnsupportedError) as error:
        check_form(error, path.name)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_PEAK_BYTES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "fuzzed.gguf"


def test_the_unchanged_file_is_valid(path: Path) -> None:
    path.write_bytes(CONTENT)
    with open_model(path) as model_file:
        assert read_model_shape(model_file).n_vocab == 3


@bounded
@given(changes=st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes(path: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(CONTENT)
    for position, value in changes:
        content[position] = value
    open_or_refuse(path, bytes(content))


@bounded
@given(position=st.integers(4, HEADER_BYTES - 8), value=st.sampled_from(WIDE_EDGES), is_wide=st.booleans())
@example(position=8, value=2**63, is_wide=True)
@example(position=16, value=2**63, is_wide=True)
@example(position=TABLE_BEGIN, value=2**63, is_wide=True)
def test_numbers_at_the_edges(path: Path, position: int, value: int, is_wide: bool) -> None:
    raw = struct.pack("<Q", value) if is_wide else struct.pack("<I", value & 0xFFFFFFFF)
    open_or_refuse(path, CONTENT[:position] + raw + CONTENT[position + len(raw) :])


@bounded
@given(
    begin=st.integers(4, HEADER_BYTES),
    n_removed=st.integers(0, 64),
    inserted=st.one_of(st.binary(max_size=64), st.integers(0, 64).map(bytes)),
)
def test_removed_and_inserted_bytes(path: Path, begin: int, n_removed: int, inserted: bytes) -> None:
    open_or_refuse(path, CONTENT[:begin] + inserted + CONTENT[begin + n_removed :])


@bounded
@given(n_present=st.integers(0, len(CONTENT)))
def test_truncated_anywhere(path: Path, n_present: int) -> None:
    open_or_refuse(path, CONTENT[:n_present])


@bounded
@given(tail=st.binary(max_size=256))
def test_a_valid_start_and_anything_after_it(path: Path, tail: bytes) -> None:
    open_or_refuse(path, b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + tail)


@bounded
@given(content=st.binary(max_size=600))
def test_any_bytes(path: Path, content: bytes) -> None:
    open_or_refuse(path, content)
