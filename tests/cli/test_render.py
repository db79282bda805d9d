"""Errors as lines, sizes for people, and who may import rich."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvs_cli
from kvs_cli.render import error_lines, error_to_json, render_plan
from kvs_core.errors import ConfigError, ModelFileError, Problem
from kvs_core.kv_types import KvType
from kvs_core.plan import plan_run
from kvs_core.units import GIB, KIB, MIB, show_size
from tests.plan.shapes import (
    make_budget,
    make_config,
    make_hybrid_shape,
    make_latent_shape,
    make_shape,
    make_window_shape,
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ModelFileError("m.gguf: bad\nline", path="m.gguf", hint="fetch it again"),
            ("m.gguf: bad line", "fetch it again"),
        ),
        (ConfigError("refused", hint="change it"), ("refused", "change it")),
        (PermissionError(13, "Permission denied", "/x"), ("/x: Permission denied", None)),
        (OSError(5, "Input/output error"), ("Input/output error", None)),
        (MemoryError(), ("out of memory", "lower the context (-c) or the batch (-ub)")),
        (
            ValueError(),
            ("this is a mistake of kvs: ValueError", "run it again with -v for the traceback, and report both"),
        ),
        (
            ConfigError([Problem(field="x", value="", reason="is wrong")], hint="for all of them"),
            ("x: is wrong", "for all of them"),
        ),
    ],
)
def test_an_error_is_one_line_with_its_hint(error: Exception, expected: tuple[str, str | None]) -> None:
    assert error_lines(error) == [expected]


def test_every_problem_is_a_line_under_the_flag_to_change() -> None:
    problems = [
        Problem(field="n_parallel", value="2", reason="no", hint="one"),
        Problem(field="rope.scale", value="", reason="why"),
        Problem(field="llama.block_count", value="7", reason="odd"),
    ]
    assert error_lines(ConfigError(problems)) == [
        ("-np 2: no", "one"),
        ("--rope-scale: why", None),
        ("llama.block_count 7: odd", None),
    ]
    document = error_to_json(ConfigError(problems))
    assert document["message"] == "-np 2: no; --rope-scale: why; llama.block_count 7: odd"
    assert document["hints"] == ["one"]


def test_sizes_have_three_digits_and_a_unit() -> None:
    assert [show_size(size) for size in (0, 1023, KIB, 1.5 * MIB, 2 * GIB)] == [
        *("0 B", "1023 B", "1.00 KiB", "1.50 MiB", "2.00 GiB")
    ]


def test_only_render_imports_rich() -> None:
    importers = set()
    for path in Path(kvs_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "rich" for name in names):
                importers.add(path.name)
    assert importers == {"render.py"}


def test_a_latent_cache_is_named_as_the_one_row_it_is() -> None:
    text = render_plan(plan_run(make_config(n_ctx=8192), make_latent_shape(), make_budget()))
    line = next(line for line in text.splitlines() if line.startswith("KV cache"))
    # 27 layers, 8192 rows of 576 half floats
    assert line.split(": ")[0].split()[2:] == ["243.00", "MiB"]
    assert "f16 latent rows, keys and values in one, 27 layers" in line


def test_a_plan_names_the_window_buffers_only_where_there_are_some() -> None:
    config = make_config(n_ctx=8192)
    assert "window" not in render_plan(plan_run(config, make_shape(), make_budget()))
    lines = render_plan(plan_run(config, make_window_shape(), make_budget())).splitlines()
    wanted = "window buffers  18.75 MiB of state: 20 layers that see the last 512 tokens, 5 pages each"
    assert wanted in lines
    assert any(line.split() == ["state", "18.75", "MiB", "18.75", "MiB"] for line in lines)


def test_a_plan_names_the_recurrent_state_only_where_there_is_some() -> None:
    config = make_config(n_ctx=8192)
    assert "recurrent" not in render_plan(plan_run(config, make_shape(), make_budget()))
    lines = render_plan(plan_run(config, make_hybrid_shape(), make_budget())).splitlines()
    assert "recurrent state  62.34 MiB of state: 20 layers, whatever the context" in lines
    assert any(line.split() == ["state", "62.34", "MiB", "62.34", "MiB"] for line in lines)


@pytest.mark.parametrize(
    ("head_dim", "types", "shown"),
    [
        (80, "q8_0/f16", "q8_0 keys, f16 values (padded), 30 layers"),
        (100, "turbo4/turbo4", "turbo4 keys, turbo4 values (rotated, padded), 30 layers"),
        (64, "q8_0/q8_0", "q8_0 keys, q8_0 values (rotated), 30 layers"),
        (80, "f16/f16", "f16 keys, f16 values, 30 layers"),
    ],
)
def test_a_plan_says_what_rows_go_through(head_dim: int, types: str, shown: str) -> None:
    type_k, type_v = (KvType(name) for name in types.split("/"))
    plan = plan_run(make_config(type_k=type_k, type_v=type_v), make_shape(head_dim=head_dim), make_budget())
    assert shown in " ".join(render_plan(plan).split())
