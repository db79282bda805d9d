"""Typed options: defaults, contradictions, everything wrong at once, where values came from (U17, U27, U32)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvs_core
from kvs_cli.arguments import read_arguments
from kvs_cli.environment import read_environment
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import ALL_COMMANDS, RUN
from kvs_cli.options import CommandOptions, build_options, describe_settings, name_flags
from kvs_cli.prompt import resolve_stop_texts
from kvs_core.config import RopeOverrides, RunConfig, SamplingConfig
from kvs_core.errors import ConfigError
from kvs_core.kv_types import KvType
from kvs_core.model_shape import RopeScaling
from kvs_core.validate import find_warnings


def build(*argv: str, environ: dict[str, str] | None = None) -> CommandOptions:
    return build_options(read_arguments(RUN, argv, FLAGS, read_environment(environ or {})))


def complaints(*argv: str, environ: dict[str, str] | None = None) -> list[str]:
    return [str(problem) for problem in build("-m", "x.gguf", *argv, environ=environ).problems]


def test_without_flags_every_value_is_the_default() -> None:
    options = build("-m", "x.gguf")
    assert options.problems == ()
    assert options.config == RunConfig(model_path=Path("x.gguf"))
    assert options.sampling == SamplingConfig()
    assert options.output.n_predict == -1
    assert options.prompt.escape


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-nkvo"], "-nkvo: changes nothing on the CPU: the KV cache is in host memory already"),
        (["-ngl", "all"], "-ngl all: changes nothing: the whole model runs on the CPU"),
    ],
)
def test_a_warning_names_the_flag_and_the_value_as_they_are_given(argv: list[str], expected: str) -> None:
    warnings = find_warnings(build("-m", "x.gguf", *argv).config)
    assert [str(name_flags(warning)) for warning in warnings] == [expected]


def test_every_flag_that_a_message_of_the_core_names_is_there() -> None:
    """Messages are written far away from the flag table, and a hint that cannot be followed is worse than none."""
    foreign = {"--merge"}  # llama-gguf-split's
    named = {
        flag
        for path in Path(kvs_core.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*\b(?!-)", node.value)
    }
    assert {"--pre-tokenizer", "--kv-stream-arena-mib", "--chat-template"} <= named
    assert {flag for flag in named - foreign if not any(FLAGS.find(flag, command) for command in ALL_COMMANDS)} == set()


def test_every_flag_sets_a_field_of_some_options() -> None:
    options = build("-m", "x.gguf")
    fields = {
        name
        for values in (options.config, options.sampling, options.prompt, options.output, options.evaluation)
        for name in type(values).__dataclass_fields__
    } | {f"rope.{name}" for name in RopeOverrides.__dataclass_fields__}
    assert {flag.dest for flag in FLAGS.own} - fields == {"help"}


def test_flags_reach_their_configuration() -> None:
    options = build(
        *("-m", "x.gguf", "-c", "128", "-ctk", "q8_0", "--rope-scaling", "yarn", "--rope-scale", "4"),
        *("--temp", "0", "-s", "7", "-n", "16", "-r", "END", "--chat", "-sys", "Be brief", "-nkvo"),
    )
    assert options.problems == ()
    assert options.config.n_ctx == 128
    assert options.config.type_k is KvType.Q8_0
    assert not options.config.kv_offload
    assert options.config.rope == RopeOverrides(scaling_type=RopeScaling.YARN, scale=4.0)
    assert options.sampling.seed == 7
    assert options.sampling.temperature == 0.0
    assert options.output.stop_texts == ("END",)
    assert options.prompt.system_prompt == "Be brief"


def test_escapes_of_stop_texts_are_resolved_like_those_of_the_prompt() -> None:
    words = ("-m", "x.gguf", "-r", r"\n\n", "-r", r"a\d")
    assert resolve_stop_texts(build(*words)).output.stop_texts == ("\n\n", r"a\d")
    assert resolve_stop_texts(build(*words, "--no-escape")).output.stop_texts == (r"\n\n", r"a\d")
    with pytest.raises(ConfigError, match="-r, its escapes resolved: the text is not valid UTF-8"):
        resolve_stop_texts(build("-m", "x.gguf", "-r", r"\xff"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-p", "a", "-f", "b"], ["-p: -f also gives the prompt"]),
        (
            ["--chat", "--chat-template", "chatml", "--chat-template-file", "t"],
            ["--chat-template: --chat-template-file also gives the template"],
        ),
        (["-sys", "x"], ["-sys: has no place in a raw completion"]),
        (["--chat-template", "chatml"], ["--chat-template: has no place in a raw completion"]),
        (["-cnv", "--json"], ["-cnv: cannot answer in one JSON document"]),
        (["-ub", "4096"], ["-ub 4096: larger than the batch it is cut from (-b 2048)"]),
        (
            ["--kv-stream-store", "kv"],
            ["--kv-stream-store kv: a host store exists only when the KV cache is streamed, "],
        ),
        (["-fa", "off", "-np", "2"], ["-fa off: there is only fused attention", "-np 2: several sequences"]),
        (
            ["-fa", "off", "-ctv", "q8_0"],
            [
                "-fa off: there is only",
                "-ctv q8_0: a quantised V cache cannot be read with flash attention off (-fa off)",
            ],
        ),
        (["-np", "0"], ["-np: 0 is out of range; allowed: 1 to 2147483647"]),
        (["-c", "x", "--lora", "l", "-fa", "off"], ["-c: 'x' is not", "--lora: adapters", "-fa off: there"]),
        (["--rope-scale", "4", "--rope-freq-scale", "0.25"], ["--rope-scale 4.0: says the same as --rope-freq-scale"]),
    ],
)
def test_contradictions_are_named_by_flag_and_all_at_once(argv: list[str], expected: list[str]) -> None:
    found = complaints(*argv)
    assert len(found) == len(expected)
    assert all(line.startswith(start) for line, start in zip(found, expected, strict=True)), found


def test_a_missing_model_is_one_problem_among_others() -> None:
    problems = [str(problem) for problem in build("-c", "x").problems]
    assert problems == ["-c: 'x' is not a whole number; allowed: 0 to 2147483647", "-m: is missing"]
    assert [str(problem) for problem in build("-m").problems] == ["-m: needs a value"]
    assert build(environ={"KVS_MODEL": "y.gguf"}).config.model_path == Path("y.gguf")


def test_sampler_settings_without_their_sampler_are_remarked_on() -> None:
    options = build("-m", "x", "--samplers", "top_k;temperature", "--top-k", "3", "--min-p", "0.1", "--top-p", "0.2")
    assert [str(warning) for warning in options.warnings] == [
        "--top-p: changes nothing: the samplers in use leave top_p out",
        "--min-p: changes nothing: the samplers in use leave min_p out",
    ]
    assert build("-m", "x", "--min-p", "0.1").warnings == ()


def test_the_configuration_in_effect_shows_values_and_origins() -> None:
    options = build("-m", "my model.gguf", "-c", "0", "-np", "1", environ={"KVS_THREADS": "3"})
    lines = describe_settings(options)
    assert "-m = 'my model.gguf' (from -m)" in lines
    assert "-c = 0 (from -c)" in lines
    assert "-np = 1 (from -np)" in lines
    assert "-t = 3 (from variable KVS_THREADS)" in lines
    assert "--kv-page-tokens = 256 (default)" in lines
    assert "-ctk = f16 (default)" in lines
    assert "--kv-stream-arena-mib = off (default)" in lines
    assert "--samplers = penalties;top_k;top_p;min_p;temperature (default)" in lines
    assert not any(line.startswith(("-h ", "-b ", "-ub ")) for line in lines), "values without a default are left out"
