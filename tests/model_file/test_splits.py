"""Split models (U05): the first part opens all, everything else is refused with what to do."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from tests.fixtures.gguf_bytes import GgufBytes, Tensor, Value, boolean, i32, number, string, tiny_llama, u16
from tests.fixtures.refusals import refused_open

WHOLE = tiny_llama()
N_TENSORS = len(WHOLE.tensors)


def make_parts(n_shards: int = 3, tensors_in_first: bool = True) -> list[GgufBytes]:
    """WHOLE cut into parts: all keys in the first, the tensors dealt out in order."""
    holders = n_shards if tensors_in_first else n_shards - 1
    per_part = -(-N_TENSORS // holders)
    groups = [WHOLE.tensors[begin : begin + per_part] for begin in range(0, N_TENSORS, per_part)]
    if not tensors_in_first:
        groups.insert(0, ())
    parts = []
    for idx, group in enumerate(groups):
        keys = WHOLE.keys if idx == 0 else ()
        split_keys = (
            ("split.no", u16(idx)),
            ("split.count", u16(n_shards)),
            ("split.tensors.count", i32(N_TENSORS)),
        )
        parts.append(GgufBytes(keys=(*keys, *split_keys), tensors=group))
    return parts


def write_parts(folder: Path, parts: list[GgufBytes], stem: str = "x") -> list[Path]:
    paths = [folder / f"{stem}-{idx:05}-of-{len(parts):05}.gguf" for idx in range(1, len(parts) + 1)]
    for path, part in zip(paths, parts, strict=True):
        path.write_bytes(part.build())
    return paths


@pytest.mark.parametrize("tensors_in_first", [True, False])
def test_the_first_part_opens_the_whole_model(tmp_path: Path, tensors_in_first: bool) -> None:
    paths = write_parts(tmp_path, make_parts(tensors_in_first=tensors_in_first))
    (tmp_path / "whole.gguf").write_bytes(WHOLE.build())
    with open_model(paths[0]) as split, open_model(tmp_path / "whole.gguf") as whole:
        assert split.path == str(paths[0])
        assert split.paths == tuple(str(path) for path in paths)
        assert split.file_bytes == sum(path.stat().st_size for path in paths)
        assert list(split.tensors) == list(whole.tensors)
        assert {tensor.shard_idx for tensor in split.tensors.values()} == ({0, 1, 2} if tensors_in_first else {1, 2})
        for name in whole.tensors:
            np.testing.assert_array_equal(split.tensor_bytes(name), whole.tensor_bytes(name))
        ours, theirs = read_model_shape(split), read_model_shape(whole)
        assert replace(ours, file_path="") == replace(theirs, file_path="")


def test_parts_of_an_odd_name_open(tmp_path: Path) -> None:
    stem = "é-00001-of-00002 (模型)"
    with open_model(write_parts(tmp_path, make_parts(), stem)[0]) as model_file:
        assert len(model_file.paths) == 3


def test_a_part_may_have_an_alignment_of_its_own(tmp_path: Path) -> None:
    parts = make_parts()
    parts[1] = replace(parts[1].with_key("general.alignment", number(4, 128)), alignment=128)
    with open_model(write_parts(tmp_path, parts)[0]) as model_file:
        assert len(model_file.tensors) == N_TENSORS


@pytest.mark.parametrize("with_keys", [True, False])
def test_a_single_part_of_one_opens(tmp_path: Path, with_keys: bool) -> None:
    part = make_parts(1)[0] if with_keys else WHOLE
    with open_model(write_parts(tmp_path, [part])[0]) as model_file:
        assert len(model_file.tensors) == N_TENSORS


@pytest.mark.parametrize("idx", [1, 2])
def test_a_later_part_is_refused_and_names_the_first(tmp_path: Path, idx: int) -> None:
    paths = write_parts(tmp_path, make_parts())
    error = refused_open(paths[idx], f"is part {idx + 1} of 3 of a split model", key="split.no")
    assert error.hint == "pass the first part, x-00001-of-00003.gguf"


def test_a_renamed_later_part_is_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    shutil.move(paths[1], tmp_path / "y.gguf")
    error = refused_open(tmp_path / "y.gguf", "is part 2 of 3", key="split.no")
    assert error.hint == "pass the first part"
    refused_open(paths[0], "part 1 of 3", "missing: x-00002-of-00003.gguf")


def test_missing_parts_are_listed(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    paths[2].unlink()
    refused_open(paths[0], "part 1 of 3", "missing: x-00003-of-00003.gguf")
    paths[1].unlink()
    refused_open(paths[0], "missing: x-00002-of-00003.gguf, x-00003-of-00003.gguf")


def test_a_long_list_of_missing_parts_is_shortened(tmp_path: Path) -> None:
    part = WHOLE.with_key("split.no", u16(0)).with_key("split.count", u16(65535))
    path = tmp_path / "x-00001-of-65535.gguf"
    path.write_bytes(part.build())
    refused_open(path, "x-00004-of-65535.gguf and 65531 more")


def test_a_renamed_first_part_is_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    shutil.move(paths[0], tmp_path / "model.gguf")
    refused_open(tmp_path / "model.gguf", "part 1 of 3", "-00001-of-00003.gguf", key="split.count")
    shutil.move(tmp_path / "model.gguf", tmp_path / "x-00002-of-00003.gguf")
    refused_open(tmp_path / "x-00002-of-00003.gguf", "part 1 of 3", "-00001-of-00003.gguf", key="split.count")


def test_concatenated_parts_are_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(path.read_bytes() for path in paths))
    error = refused_open(joined, f"begins at byte {paths[0].stat().st_size}", "cannot be concatenated")
    assert error.hint
    assert "pass the first" in error.hint
    # The same under the name of the first part, where the other parts would be found.
    joined.rename(paths[0])
    refused_open(paths[0], "cannot be concatenated")


def test_concatenated_parts_are_refused_without_padding_between_them(tmp_path: Path) -> None:
    part = GgufBytes(tensors=(Tensor(name="a", shape=(5,)),)).build()
    unpadded = part[: len(part) - 12]
    path = tmp_path / "joined.gguf"
    path.write_bytes(unpadded + part)
    refused_open(path, f"begins at byte {len(unpadded)}", "cannot be concatenated")


def test_parts_that_swapped_names_are_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    shutil.move(paths[1], tmp_path / "swap")
    shutil.move(paths[2], paths[1])
    shutil.move(tmp_path / "swap", paths[2])
    refused_open(paths[0], "x-00002-of-00003.gguf: says it is part 3 of 3", "part 2 of 3 needed", key="split.no")


def test_parts_of_different_splits_are_refused(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    other = make_parts()[1]
    paths[1].write_bytes(other.with_key("split.count", u16(4)).build())
    refused_open(paths[0], "says it is part 2 of 4", key="split.count")
    paths[1].write_bytes(other.without_key("split.no").build())
    refused_open(paths[0], "x-00002", "says it is part 1 of 3", key="split.no")
    paths[1].write_bytes(replace(other, tensors=(*other.tensors, WHOLE.tensors[0])).build())
    refused_open(paths[0], "tensor token_embd.weight is also in", "x-00001-of-00003.gguf", key="token_embd.weight")
    paths[1].write_bytes(replace(other, tensors=other.tensors[:-1]).build())
    refused_open(
        paths[0], f"hold {N_TENSORS - 1} tensors", f"split.tensors.count says {N_TENSORS}", key="split.tensors.count"
    )


def test_a_damaged_later_part_is_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path, make_parts())
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    refused_open(paths[0], "x-00003-of-00003.gguf: tensor output.weight", "does not fit", key="output.weight")
    paths[2].write_bytes(b"<html>404</html>")
    refused_open(paths[0], "x-00003-of-00003.gguf: not a GGUF file", "HTML")


@pytest.mark.parametrize(
    ("change", "fragments", "key"),
    [
        pytest.param(
            lambda part: part.with_key("split.no", u16(3)), ["split.no 3 and split.count 3"], "split.no", id="no-3-of-3"
        ),
        pytest.param(
            lambda part: part.with_key("split.count", number(4, 65536)),
            ["split.no 0 and split.count 65536"],
            "split.count",
            id="count-65536",
        ),
        pytest.param(
            lambda part: part.with_key("split.count", i32(-1)),
            ["split.count is -1"],
            "split.count",
            id="count-negative",
        ),
        pytest.param(
            lambda part: part.with_key("split.count", string("three")),
            ["split.count is three; a whole number"],
            "split.count",
            id="count-text",
        ),
        pytest.param(
            lambda part: part.with_key("split.no", boolean(True)), ["split.no is True"], "split.no", id="no-boolean"
        ),
        pytest.param(
            lambda part: part.with_key("split.tensors.count", number(6, 21.0)),
            ["split.tensors.count is 21.0"],
            "split.tensors.count",
            id="tensors-float",
        ),
    ],
)
def test_split_keys_that_make_no_sense_are_refused(
    tmp_path: Path, change: Callable[[GgufBytes], GgufBytes], fragments: list[str], key: str
) -> None:
    parts = make_parts()
    parts[0] = change(parts[0])
    refused_open(write_parts(tmp_path, parts)[0], *fragments, key=key)


def test_a_single_part_with_another_tensor_count_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    value: Value = i32(N_TENSORS + 5)
    path.write_bytes(make_parts(1)[0].with_key("split.tensors.count", value).build())
    refused_open(path, f"holds {N_TENSORS} tensors", f"says {N_TENSORS + 5}", key="split.tensors.count")
