"""argv against the flag table: spellings, values, unknown and foreign flags, variables (U17, U31, U32)."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvs_cli.arguments import Arguments, read_arguments
from kvs_cli.environment import VARIABLES, cache_folder, cache_root, read_environment, wants_colour
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import RUN, VALIDATE, Flag, FlagTable, ForeignFlag, ForeignStatus, Section
from kvs_cli.foreign_flags import FOREIGN_FLAGS
from kvs_core.config import ArenaMode, ArenaRequest, FlashAttention
from kvs_core.kv_types import KvType
from kvs_core.units import MIB


def read(*argv: str, command: str = RUN, environ: dict[str, str] | None = None) -> Arguments:
    return read_arguments(command, argv, FLAGS, read_environment(environ or {}))


def values(*argv: str, **arguments: object) -> dict[str, object]:
    found = read(*argv, **arguments)  # type: ignore[arg-type]
    assert found.problems == []
    return {dest: setting.value for dest, setting in found.settings.items()}


def complaints(*argv: str, command: str = RUN, environ: dict[str, str] | None = None) -> list[str]:
    return [
        f"{problem} [{problem.hint}]" if problem.hint else str(problem)
        for problem in read(*argv, command=command, environ=environ).problems
    ]


def test_short_and_long_spellings_set_the_same_value() -> None:
    for flag in FLAGS.of_command(RUN):
        texts = {spelling: FLAGS.find(spelling, RUN) for spelling in flag.all_spellings}
        assert all(found is flag for found in texts.values())
    assert values("-c", "4096") == values("--ctx-size", "4096") == values("--ctx-size=4096") == {"n_ctx": 4096}
    assert values("--kv-stream-arena-mib", "64") == values("--kv-stream-stage-mib", "64")


def test_underscores_in_long_names_equal_dashes() -> None:
    assert values("--ctx_size", "8") == values("--ctx_size=8") == values("--ctx-size", "8")
    assert values("--prompt", "a_b", "--rope_scaling=yarn")["prompt"] == "a_b"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-cnv"], {"conversation": True}),
        (["-no-cnv"], {"conversation": False}),
        (["-ctk", "q8_0", "-ctv", "f32"], {"type_k": KvType.Q8_0, "type_v": KvType.F32}),
        (["-ub", "128"], {"n_ubatch": 128}),
        (["-ngl", "99"], {"n_gpu_layers": 99}),
        (["-nkvo"], {"kv_offload": False}),
        (["-kvo"], {"kv_offload": True}),
        (["-fa"], {"flash_attention": FlashAttention.ON}),
        (["-fa", "-c", "8"], {"flash_attention": FlashAttention.ON, "n_ctx": 8}),
        (["-fa", "auto"], {"flash_attention": FlashAttention.AUTO}),
        (["-fa", "0"], {"flash_attention": FlashAttention.OFF}),
        (["--flash-attn=off"], {"flash_attention": FlashAttention.OFF}),
        (["--fit"], {"fit": True}),
        (["--fit", "off"], {"fit": False}),
        (["-n", "-1", "--seed", "-1", "--top-k", "-1"], {"n_predict": -1, "seed": None, "top_k": -1}),
        (["-n", "-2", "-c", "0"], {"n_predict": -2, "n_ctx": 0}),
        (["-e", "--no-escape"], {"escape": False}),
        (["--display-prompt"], {"display_prompt": True}),
        (["--no-display-prompt"], {"display_prompt": False}),
        (["-p", "", "-r", "a", "-r", "b"], {"prompt": "", "stop_texts": ("a", "b")}),
        (["-p", "- item"], {"prompt": "- item"}),
        (["--prompt=--no-escape"], {"prompt": "--no-escape"}),
        (["-sys", "Be brief"], {"system_prompt": "Be brief"}),
        (["-np", "1"], {"n_parallel": 1}),
    ],
)
def test_words_are_read_as_llama_cpp_reads_them(words: Sequence[str], expected: dict[str, object]) -> None:
    assert values(*words) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-c"], "-c: needs a value"),
        (["--ctx-size"], "--ctx-size: needs a value"),
        (["-m", "-p", "hi"], "-m: needs a value; -p is another flag"),
        (["--model", "-p", "x"], "--model: needs a value; -p is another flag [write --model=-p if that is the value]"),
        (["-c512"], "-c512: a value stands apart from a flag with one dash [write -c 512]"),
        (["-ub=128"], "-ub=128: a value stands apart from a flag with one dash [write -ub 128]"),
        (["-n-1"], "-n-1: a value stands apart from a flag with one dash [write -n -1]"),
        (["-ctkq8_0"], "-ctkq8_0: a value stands apart from a flag with one dash [write -ctk q8_0]"),
        (["--ctx-sise", "512"], "--ctx-sise: is not a flag [did you mean --ctx-size?]"),
        (["--top_pp=0.5"], "--top-pp: is not a flag [did you mean --top-p?]"),
        (["--wholly-unlike-anything"], "--wholly-unlike-anything: is not a flag [kvs run --help lists all flags]"),
        (["hello"], "hello: is not expected here [put a text with spaces in quotes, after its flag]"),
        (["-temp", "1"], "-temp: is not a flag [did you mean --temp?]"),
        (["-prompt=x"], "-prompt: is not a flag [did you mean --prompt?]"),
        (["-cc", "5"], "-cc: is not a flag [did you mean -c?]"),
        (["-c4k"], "-c4k: a value stands apart from a flag with one dash [write -c 4k]"),
        (["--nothing-like-it", "5", "-c", "8"], "--nothing-like-it: is not a flag [kvs run --help lists all flags]"),
        (["-fit", "maybe"], "maybe: is not expected here [-fit takes on, off or nothing]"),
        (["--version"], "--version: stands alone [kvs --version]"),
        (["-r", ""], "-r: is empty; a stop text needs at least one character"),
        (["--escape=true"], "--escape: takes no value, but got 'true'"),
        (["-fa", "onn"], "-fa: 'onn' is not known; allowed: on, off, auto"),
        (["-fa", "On"], "-fa: 'On' is not known; allowed: on, off, auto"),
        (["-c", "4k"], "-c: '4k' is not a whole number; allowed: 0 to 2147483647"),
        (["--batch-size", "0"], "--batch-size: 0 is out of range; allowed: 1 to 2147483647"),
        (["--device-memory-mib", "100"], "--device-memory-mib: belongs to kvs validate"),
        (["--device-memory-mib=100"], "--device-memory-mib: belongs to kvs validate"),
    ],
)
def test_a_mistake_gets_one_clear_complaint(words: Sequence[str], expected: str) -> None:
    assert complaints(*words) == [expected]


def test_a_flag_of_another_command_is_fine_there() -> None:
    assert values("--device-memory-mib", "100", command=VALIDATE) == {"device_memory_bytes": 100 * MIB}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--prompt-cache", "f"], "saving and loading the state"),
        (["--context-shift"], "shifting a full context is not supported yet"),
        (["-sm", "layer"], "a run uses one device"),
        (["-ts", "1,1"], "a run uses one device"),
        (["--lora", "a.gguf"], "adapters"),
        (["--mmproj", "a.gguf"], "only text goes in"),
        (["--grammar", "root ::= x"], "grammars"),
        (["-j", "{}"], "grammars"),
        (["--spec-type", "draft-mtp"], "speculative decoding is not supported yet"),
        (["-md", "draft.gguf"], "speculative decoding"),
        (["--mirostat", "2"], "this sampler is not supported"),
        (["--port", "8080"], "belongs to llama-server"),
        (["-hf", "user/model"], "nothing is downloaded"),
    ],
)
def test_flags_of_llama_cpp_without_a_counterpart_are_refused_by_name(words: Sequence[str], reason: str) -> None:
    found = complaints(*words)
    assert len(found) == 1, "the value of a refused flag is not a second mistake"
    assert re.match(rf"{words[0]}: {reason}", found[0])


@pytest.mark.parametrize("word", ["--no-context-shift", "--jinja", "--no-warmup", "--mmap"])
def test_a_flag_for_what_happens_anyway_is_accepted_with_a_remark(word: str) -> None:
    found = read(word, "-c", "8")
    assert found.problems == []
    assert found.get("n_ctx") == 8
    assert len(found.remarks) == 1
    assert found.remarks[0].startswith(f"{word} changes nothing: ")


def test_every_problem_of_a_command_line_is_named() -> None:
    found = complaints("-c", "x", "--lora", "a", "--tenp", "1", "-np", "0", "-h")
    assert [line.split(":")[0] for line in found] == ["-c", "--lora", "--tenp", "-np"]


def test_the_last_of_a_repeated_flag_counts_and_is_remarked_on() -> None:
    found = read("-c", "8", "--ctx-size", "16", "-np", "1")
    assert found.get("n_ctx") == 16
    assert found.remarks == ["--ctx-size replaces the earlier -c: the last one counts"]
    assert read("-r", "a", "-r", "b").remarks == []


def test_a_flag_beats_its_variable_and_the_variable_beats_the_default() -> None:
    environ = {"KVS_DEVICE": "cpu", "KVS_KV_STREAM_ARENA_MIB": "16", "KVS_THREADS": ""}
    found = read("--device", "auto", environ=environ)
    assert found.settings["device"].value == "auto"
    assert found.settings["device"].origin == "--device"
    assert found.settings["arena"].value == ArenaRequest(mode=ArenaMode.FIXED, n_bytes=16 * MIB)
    assert found.settings["arena"].origin == "variable KVS_KV_STREAM_ARENA_MIB"
    assert not found.is_given("n_threads")


def test_a_wrong_variable_is_named_only_when_it_counts() -> None:
    environ = {"KVS_KV_STREAM_ARENA_MIB": "64M"}
    assert complaints(environ=environ) == [
        "KVS_KV_STREAM_ARENA_MIB: '64M' is not a whole number; allowed: 0 to 2147483647 (MiB), or auto"
    ]
    assert complaints("--kv-stream-arena-mib", "8", environ=environ) == []


def test_every_variable_sets_a_value_of_the_table() -> None:
    dests = {flag.dest for flag in FLAGS.own}
    assert {dest for dest, _ in VARIABLES.values()} <= dests


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_colours_follow_no_color_and_term(environ: dict[str, str], expected: bool) -> None:
    assert wants_colour(environ) is expected


def test_kernels_are_kept_where_the_strongest_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root({"KVS_CACHE_DIR": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root({"KVS_CACHE_DIR": "~/kernels"}) == Path("/home/someone/kernels")
    assert cache_root({"KVS_CACHE_DIR": "", "XDG_CACHE_HOME": "/b"}) == Path("/b")
    assert cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/kvs")
    assert cache_root({}) == cache_root({"XDG_CACHE_HOME": "relative"}) == Path("/home/someone/.cache")

    def no_home() -> Path:
        raise RuntimeError("no home directory")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_root({}) == Path(tempfile.gettempdir())


def test_a_spelling_stands_once_per_command() -> None:
    one = Flag(dest="a", spellings=("-a",), help="", section=Section.GENERAL, commands=(RUN,))
    other = Flag(dest="b", spellings=("-a",), help="", section=Section.GENERAL, commands=(VALIDATE,))
    foreign = ForeignFlag(spellings=("-a",), takes_value=False, status=ForeignStatus.REFUSED, reason="x")
    table = FlagTable(own=(one, other))
    assert table.find("-a", RUN) is one
    assert table.find("-a", VALIDATE) is other
    for flags in ((one, one), (one, other)):
        with pytest.raises(ValueError, match="-a stands twice"):
            FlagTable(own=flags, foreign=(foreign,))


def test_help_and_reason_texts_are_complete() -> None:
    for flag in FLAGS.own:
        assert flag.help.endswith((".", "?"))
        assert bool(flag.metavar) == flag.takes_value
    for foreign in FOREIGN_FLAGS:
        assert foreign.reason
        assert all(re.fullmatch(r"--?[a-zA-Z0-9][a-zA-Z0-9.-]*", spelling) for spelling in foreign.spellings)
