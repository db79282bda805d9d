"""``kvs run`` and ``kvs validate`` on tiny models: text, limits, JSON, streams (U13, U26, U33, U37, U39)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvs_cli.generate import StopReason
from kvs_core.cpu.backend import CpuBackend
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.cli.conftest import Finished, Kvs

DOCS = Path(__file__).parents[2] / "docs"
LLAMA = "🦙"
COMMON = ("-c", "64", "-ub", "16", "-b", "16", "-t", "1", "--device", "cpu")


def run(kvs: Kvs, model: Path, *words: str | Path, stdin: bytes = b"") -> Finished:
    finished = kvs("run", "-m", model, *COMMON, "--temp", "0", *words, stdin=stdin)
    assert finished.code == 0, finished.err
    return finished


def test_text_goes_to_standard_output_and_nothing_else_does(kvs: Kvs, cycle_model: Path) -> None:
    finished = run(kvs, cycle_model, "-p", LLAMA, "-n", "8", "--no-display-prompt")
    assert finished.text == LLAMA * 2
    assert "\r" not in finished.err
    assert "\x1b" not in finished.err
    lines = finished.err.splitlines()
    assert lines[0] == "context: 64 tokens (requested 64, training length 512)"
    assert lines[1].startswith("seed: ")
    assert [line.split("=")[0].strip() for line in lines[2:]] == [
        "load time",
        "prompt eval time",
        "eval time",
        "total time",
    ]


def test_the_prompt_is_shown_first_as_in_llama_cpp(kvs: Kvs, cycle_model: Path) -> None:
    assert run(kvs, cycle_model, "-p", LLAMA, "-n", "4").text == f" {LLAMA}{LLAMA}"
    assert run(kvs, cycle_model, "-p", LLAMA, "-n", "0").text == f" {LLAMA}"
    assert run(kvs, cycle_model, "-n", "4", "--no-display-prompt", stdin=f"{LLAMA}\n".encode()).text == LLAMA


def test_verbose_shows_token_ids_and_changes_no_text(kvs: Kvs, cycle_model: Path) -> None:
    words = ("-p", LLAMA, "-n", "4", "--no-display-prompt")
    quiet, verbose = run(kvs, cycle_model, *words), run(kvs, cycle_model, *words, "-v")
    assert quiet.out == verbose.out
    ids = " ".join(str(3 + byte) for byte in LLAMA.encode())
    assert f"generated: {ids}\n" in verbose.err
    prompt = next(line for line in verbose.err.splitlines() if line.startswith("prompt: "))
    assert prompt.startswith("prompt: 6 tokens: 1 ")
    assert prompt.endswith(ids)
    assert "-n = 4 (from -n)\n" in verbose.err


@pytest.mark.parametrize("n_predict", [1, 2, 3, 5, 6, 7])
def test_a_character_is_never_cut_except_at_the_very_end(kvs: Kvs, cycle_model: Path, n_predict: int) -> None:
    text = run(kvs, cycle_model, "-p", LLAMA, "-n", str(n_predict), "--no-display-prompt").text
    whole, rest = divmod(n_predict, 4)
    assert text == LLAMA * whole + ("\ufffd" if rest else "")


@pytest.mark.parametrize("arena", [[], ["--kv-stream-arena-mib", "auto"]])
def test_the_context_is_filled_to_the_last_token_and_no_further(kvs: Kvs, cycle_model: Path, arena: list[str]) -> None:
    finished = run(kvs, cycle_model, "-p", LLAMA, "--json", *arena)
    document = json.loads(finished.out)
    assert (document["n_prompt"], document["n_generated"]) == (6, 58)
    assert document["stop_reason"] == StopReason.CONTEXT_FULL.value
    assert "warning: context full: 6 prompt and 58 generated tokens fill all 64; raise -c for more\n" in finished.err
    exact = run(kvs, cycle_model, "-p", LLAMA, "--json", "-c", "6", *arena)
    assert json.loads(exact.out)["n_generated"] == 0


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(kvs: Kvs, cycle_model: Path) -> None:
    finished = kvs("run", "-m", cycle_model, *COMMON, "-c", "5", "-p", LLAMA)
    assert finished.code == 2
    assert finished.out == b""
    assert "error: the prompt: 6 tokens are more than the context of 5 tokens holds\n" in finished.err


def test_a_stop_text_ends_the_run(kvs: Kvs, cycle_model: Path) -> None:
    finished = run(kvs, cycle_model, "-p", LLAMA, "-r", r"\xF0\x9F\xA6\x99" * 2, "--json")
    document = json.loads(finished.out)
    assert document["stop_reason"] == "stop_text"
    assert document["stop_text"] == LLAMA * 2
    assert document["text"] == "", "the same text as without --json, which does not print the stop text"


def test_an_explicitly_empty_prompt_starts_from_bos(kvs: Kvs, tiny_model: Path) -> None:
    document = json.loads(run(kvs, tiny_model, "-p", "", "-n", "2", "--json").out)
    assert document["n_prompt"] == 1
    assert document["n_generated"] <= 2


def test_chat_applies_the_template_and_shows_only_the_answer(kvs: Kvs, cycle_model: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }} {% endfor %}" + LLAMA
    words = ("--chat", "--chat-template", template, "-sys", "S", "-p", "hello", "-n", "4")
    finished = run(kvs, cycle_model, *words, "-v")
    assert finished.text == LLAMA
    shown = run(kvs, cycle_model, *words, "--display-prompt").text
    assert shown == f" system:S user:hello {LLAMA}{LLAMA}"


def test_conversation_without_a_terminal_is_one_turn(kvs: Kvs, cycle_model: Path) -> None:
    finished = run(kvs, cycle_model, "-cnv", "--chat-template", "{{ messages[0].content }}", "-p", LLAMA, "-n", "4")
    assert finished.text == LLAMA
    assert "warning: -cnv: standard input is not a terminal, so this is one turn, as with --chat\n" in finished.err


def test_the_drawn_seed_gives_the_same_text_again(kvs: Kvs, tiny_model: Path) -> None:
    words = ("run", "-m", tiny_model, *COMMON, "--temp", "1.5", "--top-k", "0", "-p", "the", "-n", "12", "--json")
    first = json.loads(kvs(*words).out)
    second = json.loads(kvs(*words).out)
    assert first["seed"] != second["seed"]
    assert first["token_ids"] != second["token_ids"]
    again = json.loads(kvs(*words, "--seed", str(first["seed"])).out)
    assert again["token_ids"] == first["token_ids"]


def run_deep(kvs: Kvs, model: Path, *words: str) -> dict[str, Any]:
    """A long prompt on a model whose cache does not fit the smallest arena."""
    shape = ("-c", "512", "-ub", "16", "-b", "16", "-ctk", "f32", "-ctv", "f32", "--device", "cpu")
    finished = kvs(
        *("run", "-m", model, *shape, "--kv-page-tokens", "16", "--temp", "0", "-p", "the sea " * 100),
        *("-n", "8", "--ignore-eos", "--json", *words),
    )
    assert finished.code == 0, finished.err
    return {**json.loads(finished.out), "err": finished.err}


def test_a_streamed_run_reports_what_it_streamed_and_says_the_same(kvs: Kvs, deep_model: Path) -> None:
    whole = run_deep(kvs, deep_model)
    assert whole["streaming"] is None
    assert "streaming:" not in whole["err"]
    smallest = run_deep(kvs, deep_model, "--kv-stream-arena-mib", str(whole["plan"]["minimum_arena_mib"]))
    streaming = smallest["streaming"]
    assert streaming["bytes_streamed"] == streaming["predicted_bytes_streamed"] > 0
    assert streaming["decode_steps"] == streaming["decode_steps_in_decode_layout"] == 7
    line = next(line for line in smallest["err"].splitlines() if line.startswith("streaming: "))
    assert f" {streaming['pages_streamed']} pages (" in line
    assert line.endswith(" of the measured copy rate")
    assert smallest["token_ids"] == whole["token_ids"]


def test_a_run_that_streamed_nothing_says_so(kvs: Kvs, tiny_model: Path) -> None:
    finished = run(kvs, tiny_model, "-p", "the", "-n", "2", "--kv-stream-arena-mib", "auto")
    assert finished.err.splitlines()[-1].endswith("pages resident, nothing streamed: every page fitted")


def test_validate_prints_the_plan_that_run_uses(kvs: Kvs, tiny_model: Path) -> None:
    words = ("-m", tiny_model, *COMMON, "--kv-stream-arena-mib", "auto", "--json")
    planned = kvs("validate", *words)
    assert planned.code == 0
    ran = kvs("run", *words, "-p", "the", "-n", "1")
    plans = [json.loads(finished.out)["plan"] for finished in (planned, ran)]
    for plan in plans:
        del plan["device"]  # free memory changes from moment to moment
        for phase in ("prefill", "decode"):
            layout = plan["arena"][phase]
            regions = [layout[f"{region}_bytes"] for region in ("resident", "ring", "state", "workspace", "unused")]
            assert sum(regions) == plan["arena"]["allocated_bytes"]
    assert plans[0] == plans[1]


def test_validate_refuses_what_does_not_fit_with_code_2_and_run_with_4(kvs: Kvs, tiny_model: Path) -> None:
    words = ("-m", tiny_model, "-c", "512", "-ub", "512", "-p", "the", "--device", "cpu", "--kv-stream-arena-mib", "1")
    planned, ran = kvs("validate", *words), kvs("run", *words)
    assert (planned.code, ran.code) == (2, 4)
    assert planned.out == ran.out == b""
    assert "arena 1 MiB is too small for prefill with -ub 512: needs " in planned.err
    assert "arena 1 MiB is too small for prefill with -ub 512: needs " in ran.err
    minimum = ran.err.split("needs ")[1].split(" MiB")[0]
    enough = [minimum if word == "1" else word for word in words]
    assert kvs("run", *enough, "-n", "1").code == 0


def test_validate_plans_for_a_device_that_is_not_there(kvs: Kvs, tiny_model: Path) -> None:
    words = ("validate", "-m", tiny_model, "-c", "512", "--json")
    finished = kvs(*words, "--device-memory-mib", "24000")
    assert "planned for an assumed device; nothing on a real one was checked\n" in finished.err
    plan = json.loads(finished.out)["plan"]
    assert plan["device"]["kind"] == "cuda"
    assert plan["device"]["free_bytes"] == 24000 * MIB
    assert (
        json.loads(kvs(*words, "--device", "cpu", "--device-memory-mib", "900").out)["plan"]["device"]["kind"] == "cpu"
    )
    refused = kvs(*words, "--device-memory-mib", "10")
    assert refused.code == 2
    assert "exceed the 10.00 MiB free (cuda assumed)" in refused.err
    assert "hint: lower -ub, use a model file with smaller weights" in refused.err


def test_validate_as_text_names_the_figures_that_matter(kvs: Kvs, tiny_model: Path) -> None:
    text = kvs("validate", "-m", tiny_model, *COMMON, "--kv-stream-arena-mib", "auto").text
    names = [line.split("  ")[0] for line in text.splitlines() if line]
    assert names == [
        *("model", "device", "context", "batch", "KV cache", "weights", "arena", "host store", "smallest arena"),
        *("useful maximum", "streamed", "device memory", "host memory", "region", "resident", "ring", "state"),
        *("workspace", "unused", "arena", "resident pages of a layer", "streamed pages of a layer"),
    ]
    assert "\x1b" not in text


def test_a_gpu_that_was_asked_for_is_never_replaced(kvs: Kvs, tiny_model: Path) -> None:
    for command in ("run", "validate"):
        finished = kvs(command, "-m", tiny_model, "-p", "the", "--device", "cuda")
        assert finished.code == 5
        assert finished.out == b""
        assert finished.err.startswith("error: device cuda")
        assert "package is missing" in finished.err or "no working CUDA driver: CUDA driver library" in finished.err
    assert "hint: plan for a card that is not here with --device-memory-mib N\n" in finished.err


def test_what_cannot_be_used_is_refused_before_weights_are_read(kvs: Kvs, tiny_model: Path) -> None:
    """``tiny_model`` has no chat template; a run that planned would say its context first."""
    for words in (("-p", "the", "-r", r"\xff"), ("-p", "the", "--chat"), ("--chat", "-r", r"\xff")):
        ran, validated = (
            kvs(command, "-m", tiny_model, *COMMON, *words, stdin=b"the") for command in ("run", "validate")
        )
        assert ran.code == validated.code == 2
        assert ran.err == validated.err
        assert ran.err.startswith("error: ")


def test_validate_judges_a_given_prompt_as_run_does(kvs: Kvs, tiny_model: Path, tmp_path: Path) -> None:
    bad = tmp_path / "latin1.txt"
    bad.write_bytes(b"caf\xe9")
    words = ("-m", tiny_model, "-c", "32", "--device", "cpu")
    for prompt in (("-f", tmp_path / "none"), ("-f", tmp_path), ("-f", bad), ("-p", "the " * 40), ("-p", r"\xff")):
        ran, validated = (kvs(command, *words, *prompt) for command in ("run", "validate"))
        assert validated.code == ran.code != 0
        assert validated.err == ran.err
        assert validated.out == b""
    assert kvs("validate", *words, "-p", "the").code == 0
    assert kvs("validate", *words, stdin=b"\xff").code == 0  # standard input is not its to read


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--kv-page-tokens", "32"), "error: --kv-page-tokens 32: CUDA attention needs a multiple of 64\n"),
        (("-ngl", "1"), "error: -ngl 1: a model runs on one device as a whole"),
        (("-nkvo",), "error: -nkvo: attention runs on the device"),
    ],
)
def test_auto_is_judged_as_the_device_it_becomes(
    kvs: Kvs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr("kvs_cli.opening.resolve_device", lambda _: "cuda")
    for command in ("run", "validate"):
        finished = kvs(command, "-m", tiny_model, "-p", "the", *words)
        assert finished.code == 2
        assert line in finished.err
    assumed = kvs("validate", "-m", tiny_model, *words, "--device-memory-mib", "9000")
    assert assumed.code == 2


def test_variables_that_look_like_ours_and_are_not_are_warned_about(
    kvs: Kvs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVS_DEVISE", "cuda")
    monkeypatch.setenv("KVS_ARENA", "")
    finished = kvs("validate", "-m", tiny_model, "--device", "cpu")
    assert finished.code == 0
    assert finished.err.startswith("warning: KVS_DEVISE in the environment: not known and ignored; known: KVS_MODEL, ")
    assert finished.err.count("KVS_DEVISE") == 1


def test_what_a_backend_notes_during_a_run_is_said_at_its_end(
    kvs: Kvs, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = ["early"]
    monkeypatch.setattr(CpuBackend, "notes", property(lambda _: tuple(noted)))
    decode = Session.decode

    def decode_and_note(session: Session, tokens: Sequence[int]) -> NDArray[np.float32]:
        noted[1:] = ["late"]
        return decode(session, tokens)

    monkeypatch.setattr(Session, "decode", decode_and_note)
    finished = kvs("run", "-m", tiny_model, "-p", "the", "-n", "3", "--ignore-eos", "--device", "cpu")
    assert finished.code == 0
    assert finished.err.count("warning: early\n") == finished.err.count("warning: late\n") == 1


def test_the_choice_of_auto_is_said(kvs: Kvs, tiny_model: Path) -> None:
    finished = kvs("validate", "-m", tiny_model, "-c", "64", "--device", "auto")
    assert finished.err.startswith("device: cpu (no usable GPU was found; kvs doctor says why)\n")


def test_a_context_beyond_training_is_warned_about(kvs: Kvs, tiny_model: Path) -> None:
    finished = kvs("validate", "-m", tiny_model, "-c", "513")
    assert finished.code == 0
    assert finished.err.startswith("warning: -c 513: beyond the training length of 512 tokens; ")
    assert "context: 513 tokens (requested 513, training length 512)\n" in finished.err
    assert (
        "context: 512 tokens (requested training length, training length 512)\n"
        in kvs("validate", "-m", tiny_model, "-c", "0").err
    )


def keys_of(document: dict[str, Any]) -> set[str]:
    """Every key at every level."""
    found = set(document)
    for value in document.values():
        if isinstance(value, dict):
            found |= keys_of(value)
    return found


def test_every_key_of_the_json_documents_is_documented(kvs: Kvs, deep_model: Path) -> None:
    document = run_deep(kvs, deep_model, "--kv-stream-arena-mib", "auto")
    del document["err"]
    for by_types in ("kernels", "layers_of_types"):
        del document["plan"][by_types]  # the keys are the pairs of types in use
    error = json.loads(kvs("run", "--json", "-np", "2", "-p", "hi").out)
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    missing = {key for key in keys_of(document) | keys_of(error) if f"`{key}`" not in text}
    assert missing == set()
