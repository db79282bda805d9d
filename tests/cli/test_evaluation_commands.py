"""``kvs perplexity`` and ``kvs kl-divergence`` on tiny models (U16, U17, U19, U20, U21, U30, U36)."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvs_cli import evaluation
from kvs_cli.exits import SignalReceived
from kvs_core.cpu import backend as cpu_backend
from kvs_core.evaluate import partial_file
from kvs_core.session import Session
from kvs_core.units import MIB
from tests.cli.conftest import Finished, Kvs
from tests.fixtures.tiny_models import TinyModel, make_text, tiny_catalogue, write_model
from tests.fixtures.tiny_vocab import spm_vocab

DATA = Path(__file__).parents[1] / "data"
DOCS = Path(__file__).parents[2] / "docs"
COMMON = ("-c", "64", "-b", "64", "--device", "cpu", "-t", "2")


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Interrupted runs of one test are nobody else's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvs" / "evaluate"


def document_of(finished: Finished, code: int = 0) -> dict[str, Any]:
    assert finished.code == code, finished.err
    document: dict[str, Any] = json.loads(finished.out)
    return document


def interrupt_after(monkeypatch: pytest.MonkeyPatch, n_passes: int) -> None:
    """A SIGINT arrives in the pass over a chunk that follows ``n_passes`` whole ones (a side counts for itself)."""
    original = Session.prefill_rows
    left = n_passes

    def prefill_rows(self: Session, tokens: Any, *, output_begin: int) -> Iterator[Any]:
        nonlocal left
        left -= 1
        for item in original(self, tokens, output_begin=output_begin):
            if left < 0:
                raise SignalReceived(signal.SIGINT)
            yield item

    monkeypatch.setattr(Session, "prefill_rows", prefill_rows)


# Text


@pytest.mark.parametrize(("text", "n_tokens"), [("", 1), ("ab", 3), ("x" * 125, 127)])
def test_a_short_text_is_one_line_with_both_counts(
    kvs: Kvs, tiny_model: Path, tmp_path: Path, text: str, n_tokens: int
) -> None:
    path = tmp_path / "short.txt"
    path.write_text(text)
    finished = kvs("perplexity", "-m", tiny_model, "-f", path, *COMMON)
    assert finished.code == 2
    assert finished.out == b""
    assert f"error: text has {n_tokens} tokens, needs at least 128 for a context of 64\n" in finished.err


def test_exactly_two_chunks_are_enough(kvs: Kvs, tiny_model: Path) -> None:
    document = document_of(kvs("perplexity", "-m", tiny_model, "-p", "x" * 126, *COMMON, "--json"))
    assert document["evaluation"]["chunks"] == 2
    assert document["perplexity"]["rows"] == 62
    assert document["perplexity"]["uncertainty"] > 0


def test_text_is_not_changed(tmp_path: Path, kvs: Kvs, tiny_model: Path) -> None:
    """CR LF and a byte-order mark are tokens like others; one newline at the end of a file is not part of it."""
    path = tmp_path / "text.txt"
    chunks = []
    for data in (b"a b\n" * 60, b"a b\r\n" * 60, b"\xef\xbb\xbf" + b"a b\n" * 60, (b"a b\n" * 60)[:-1]):
        path.write_bytes(data)
        finished = kvs("perplexity", "-m", tiny_model, "-f", path, *COMMON, "-v")
        assert finished.code == 0, finished.err
        (line,) = [line for line in finished.err.splitlines() if line.startswith("text: ")]
        chunks.append(int(line.split()[1]))
    assert chunks[1] == chunks[0] + 60
    assert chunks[2] == chunks[0] + 4  # three bytes, and the first word is parted from its space
    assert chunks[3] == chunks[0]


def test_standard_input_is_a_text_too(kvs: Kvs, tiny_model: Path, text_file: Path) -> None:
    from_file = kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON)
    from_stream = kvs("perplexity", "-m", tiny_model, *COMMON, stdin=text_file.read_bytes())
    assert from_file.code == 0
    assert from_stream.out == from_file.out


def test_a_text_that_is_no_utf8_is_refused(kvs: Kvs, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"lim\xf3n " * 100)
    finished = kvs("perplexity", "-m", tiny_model, "-f", path, *COMMON)
    assert finished.code == 2
    assert "byte offset 3" in finished.err


# Perplexity


def test_the_report_is_llama_perplexity_s(kvs: Kvs, tmp_path: Path) -> None:
    """Model, text, flags and figures of the golden run of llama-perplexity."""
    golden = json.loads((DATA / "perplexity_tiny.json").read_text())
    for name in ("untied", "rope-factors"):
        model = tiny_catalogue()[name](tmp_path / f"{name}.gguf")
        words = ("perplexity", "-m", model, "-f", DATA / "kld_tiny_text.txt", *COMMON, "-ctk", "f32", "-ctv", "f32")
        expected = golden["models"][name]
        document = document_of(kvs(*words, "--json"))
        # Two units of the last printed digit: the sums of a forward pass are added in another order.
        assert document["perplexity"]["chunks"] == pytest.approx(expected["running"], abs=2e-3, rel=0)
        assert document["perplexity"]["uncertainty"] == pytest.approx(expected["uncertainty"], abs=2e-3, rel=0)
        strided = document_of(kvs(*words, "--json", "--ppl-stride", str(expected["stride"]), "--chunks", "4"))
        assert strided["evaluation"]["n_ctx"] == expected["stride_window"]
        assert strided["perplexity"]["chunks"] == pytest.approx(expected["stride_running"], abs=2e-3, rel=0)


def test_standard_output_holds_the_result_and_nothing_else(kvs: Kvs, tiny_model: Path, text_file: Path) -> None:
    finished = kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON)
    lines = finished.text.splitlines()
    assert lines[0].startswith("[1]")
    assert lines[1].startswith("Final estimate: PPL = ")
    assert lines[2].startswith("Block-wise uncertainty: +/- ")
    assert len(lines) == 3
    assert "\r" not in finished.err


def test_nan_weights_stop_at_their_chunk_and_json_has_null(kvs: Kvs, tmp_path: Path) -> None:
    """The NaN sits in the embedding of one byte that the text first uses in its third chunk."""
    embedding = np.random.default_rng(0).normal(0, 0.02, (len(TinyModel().vocab.tokens), 256)).astype(np.float32)
    embedding[3 + ord("~")] = np.nan
    model = write_model(tmp_path / "nan.gguf", TinyModel(), weights={"token_embd.weight": embedding})
    text = "x" * 150 + "~" + "y" * 150
    finished = kvs("perplexity", "-m", model, "-p", text, *COMMON, "--json")
    document = document_of(finished, code=1)
    assert document["perplexity"]["ppl"] is None
    assert len(document["perplexity"]["chunks"]) == 2
    assert document["evaluation"]["non_finite"]["chunk"] == 3
    assert document["error"]["exit_code"] == 1
    assert "error: chunk 3 of 4: logits of token" in finished.err
    as_text = kvs("perplexity", "-m", model, "-p", text, *COMMON)
    assert as_text.code == 1
    assert as_text.text.startswith("[1]")
    assert "Final estimate" not in as_text.text


@pytest.mark.parametrize(("chunks", "code"), [("-1", 0), ("2", 0), ("99", 2), ("0", 2), ("-3", 2)])
def test_chunks(kvs: Kvs, tiny_model: Path, text_file: Path, chunks: str, code: int) -> None:
    finished = kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "--chunks", chunks)
    assert finished.code == code
    if chunks == "99":
        assert "--chunks 99: only " in finished.err


def test_one_sequence_is_kept_and_several_are_refused(kvs: Kvs, tiny_model: Path, text_file: Path) -> None:
    words = ("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "-b", "2048")
    assert kvs(*words, "-np", "1").out == kvs(*words).out
    assert "-np = 1 (from -np)\n" in kvs(*words, "-np", "1", "-v").err
    refused = kvs(*words, "-np", "4", "--kv-stream-arena-mib", "64")
    assert refused.code == 2
    assert "error: -np 4: " in refused.err


# Base files


@pytest.fixture
def bases(kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path) -> dict[str, Path]:
    """The same run saved in both formats."""
    paths = {}
    for kind in ("llama", "kvs"):
        paths[kind] = tmp_path / f"base.{kind}"
        finished = kvs(
            *("perplexity", "-m", tiny_model, "-f", text_file, *COMMON),
            *("--kl-divergence-base", paths[kind], "--kld-format", kind),
        )
        assert finished.code == 0, finished.err
        assert not list(tmp_path.glob("*.partial")) + list(tmp_path.glob("*.journal"))
    return paths


def test_a_run_compared_with_its_own_base(kvs: Kvs, tiny_model: Path, bases: dict[str, Path]) -> None:
    """Text and context come from the file."""
    words = ("perplexity", "-m", tiny_model, "--kl-divergence", "--json", "--device", "cpu", "-b", "64")
    ours = document_of(kvs(*words, "--kl-divergence-base", bases["kvs"], "--max-kld", "0"))
    assert ours["kld"]["rows_identical"] == ours["kld"]["rows"] > 0
    assert ours["kld"]["max"] == 0
    assert ours["perplexity"]["ppl_base_exact"] is True
    theirs = document_of(kvs(*words, "--save-all-logits", bases["llama"], "--min-same-top", "100"))
    assert theirs["kld"]["rows_identical"] is None
    assert abs(theirs["kld"]["max"]) <= theirs["kld"]["floor"]
    assert theirs["perplexity"]["ppl_base_exact"] is False
    assert theirs["evaluation"] == ours["evaluation"]


def test_how_a_base_file_was_made_is_told(
    kvs: Kvs, tiny_model: Path, text_file: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    words = ("perplexity", "-m", tiny_model, "--kl-divergence", "--json", "--device", "cpu", "-b", "64")
    kinds = {
        "types": ("-ctk", "q8_0", "-ctv", "turbo4", "--kv-layer-types", "first1:f16"),
        "unrotated": ("-ctk", "q8_0", "--no-kv-rotate"),
    }
    for name, flags in kinds.items():
        saves = ("--save-all-logits", tmp_path / name, "--kld-format", "kvs")
        assert kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, *flags, *saves).code == 0

    compared = kvs(*words, "--kl-divergence-base", tmp_path / "types", "-ctk", "f32")
    made_with = document_of(compared)["configuration"]["base_made_with"]
    shown = "q8_0 keys, turbo4 values, layers first1:f16/f16, quantised rows rotated; measured: f32 keys, f16 values\n"
    assert f"base file: {shown}" in compared.err
    assert (made_with["type_k"], made_with["type_v"], made_with["layer_types"]) == ("q8_0", "turbo4", "first1:f16/f16")
    assert made_with["kv_rotate"] is True
    assert document_of(compared)["configuration"]["layer_types"] == []

    files = kvs("kl-divergence", "--base", tmp_path / "types", "--other", tmp_path / "unrotated", "--json")
    assert "measured: q8_0 keys, f16 values, quantised rows not rotated\n" in files.err
    assert document_of(files)["configuration"]["measured"]["made_with"]["kv_rotate"] is False
    llama = kvs(*words, "--kl-divergence-base", bases["llama"])
    assert "base file" not in llama.err
    assert document_of(llama)["configuration"]["base_made_with"] is None

    other = write_model(tmp_path / "other.gguf", TinyModel(weight_std=0.1))
    assert (
        "values, of another model file; measured: "
        in kvs(
            *("perplexity", "-m", other, "--kl-divergence", "--kl-divergence-base", bases["kvs"], "--device", "cpu")
        ).err
    )


def test_the_report_of_a_comparison_is_llama_perplexity_s(kvs: Kvs, tmp_path: Path) -> None:
    """Line by line; figures may differ by what another order of additions does to logits (1e-5 of them)."""
    model = tiny_catalogue()["rope-factors"](tmp_path / "rope-factors.gguf")
    finished = kvs(
        *("perplexity", "-m", model, "--kl-divergence", "--kl-divergence-base", DATA / "kld_tiny_base.kld"),
        *("-b", "64", "-ctk", "f32", "-ctv", "f32", "--device", "cpu"),
    )
    assert finished.code == 0, finished.err
    ours = finished.text.splitlines()
    theirs = (DATA / "kld_tiny_other.txt").read_text(encoding="utf-8").splitlines()[1:]
    assert len(ours) > len(theirs)
    for our_line, their_line in zip(ours, theirs, strict=False):
        our_words, their_words = our_line.split(), their_line.split()
        assert len(our_words) == len(their_words), (our_line, their_line)
        for ours_word, theirs_word in zip(our_words, their_words, strict=True):
            if ours_word != theirs_word:
                assert float(ours_word.rstrip("%")) == pytest.approx(float(theirs_word.rstrip("%")), rel=2e-5, abs=2e-5)


def test_a_base_file_that_does_not_fit_the_run_is_refused_by_field(
    kvs: Kvs, tiny_model: Path, bases: dict[str, Path], tmp_path: Path
) -> None:
    words = ("perplexity", "-m", tiny_model, "--kl-divergence", "--kl-divergence-base", bases["llama"])
    context = kvs(*words, "-c", "128")
    assert context.code == 2
    assert "error: base file context 64: -c asks for 128\n" in context.err
    text = kvs(*words, "-p", "something else " * 50)
    assert text.code == 2
    assert "error: base file tokens " in text.err
    other = write_model(tmp_path / "other.gguf", TinyModel(vocab=spm_vocab(n_filler=2)))
    vocabulary = kvs("perplexity", "-m", other, "--kl-divergence", "--kl-divergence-base", bases["llama"])
    assert vocabulary.code == 2
    assert "error: base file vocabulary " in vocabulary.err


def test_a_short_base_file_is_refused_before_the_model_is_opened(kvs: Kvs, bases: dict[str, Path]) -> None:
    for path in bases.values():
        path.write_bytes(path.read_bytes()[:-1000])
        finished = kvs("perplexity", "-m", "missing.gguf", "--kl-divergence", "--kl-divergence-base", path)
        assert finished.code == 6
        assert "chunks are whole" in finished.err
        assert "missing.gguf" not in finished.err
        assert finished.out == b""


def test_a_full_disk_is_refused_before_the_model_runs(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        f_bavail, f_frsize = 1, 4096

    monkeypatch.setattr(partial_file.os, "statvfs", lambda _: FullDisk)
    path = tmp_path / "base.kld"
    finished = kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "--kl-divergence-base", path)
    assert finished.code == 6
    assert ": the base file needs " in finished.err
    assert " bytes more, 4096 are free\n" in finished.err
    assert list(tmp_path.glob("base*")) == []


@pytest.mark.parametrize("kind", ["llama", "kvs"])
def test_an_interrupted_base_file_is_finished_by_the_same_command(
    kvs: Kvs,
    tiny_model: Path,
    text_file: Path,
    bases: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    path = tmp_path / "again"
    words = (
        *("perplexity", "-m", tiny_model, "-f", text_file, *COMMON, "--json"),
        *("--kl-divergence-base", path, "--kld-format", kind),
    )
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        stopped = kvs(*words)
    assert stopped.code == 130
    assert "2 of " in stopped.err
    assert "chunks are finished and kept: the same command goes on from there\n" in stopped.err
    assert json.loads(stopped.out)["error"]["exit_code"] == 130
    assert not path.exists()
    resumed = kvs(*words)
    assert "going on with chunk 3 of " in resumed.err
    assert path.read_bytes() == bases[kind].read_bytes()
    path.unlink()
    assert resumed.out == kvs(*words).out


# Lock-step


def test_streaming_is_certified_in_lock_step(kvs: Kvs, deep_model: Path, text_file: Path) -> None:
    shape = (
        *("-m", deep_model, "-c", "256", "-ub", "32", "-b", "256", "--device", "cpu"),
        *("--kv-page-tokens", "16", "-ctk", "f32", "-ctv", "f32", "--json"),
    )
    arena = document_of(kvs("validate", *shape))["plan"]["minimum_arena_mib"]
    finished = kvs(
        *("kl-divergence", *shape, "-f", text_file, "--max-kld", "0"),
        *("--kv-stream-arena-mib", str(arena), "--base-kv-stream-arena-mib", "0"),
    )
    document = document_of(finished)
    assert document["kld"]["rows_identical"] == document["kld"]["rows"] > 0
    assert document["kld"]["mean"] == document["kld"]["max"] == 0
    assert document["kld"]["same_top"] == 1
    assert document["base_streaming"] is None
    streaming = document["streaming"]
    assert streaming["bytes_streamed"] == streaming["predicted_bytes_streamed"] > 0
    assert document["configuration"]["measured"]["arena_bytes"] == arena * MIB
    assert document["configuration"]["base"]["arena_bytes"] == 0


def test_layers_of_different_types_are_certified_with_a_tenth_resident(kvs: Kvs, tmp_path: Path) -> None:
    model = TinyModel(n_layer=16, n_ctx_train=512, n_head=8, n_head_kv=8, head_dim=64, weight_std=0.08)
    path = write_model(tmp_path / "model.gguf", model)
    text = tmp_path / "text.txt"
    text.write_text(make_text(400), encoding="utf-8")
    shape = (
        *("-m", path, "-c", "512", "-ub", "32", "-b", "512", "--device", "cpu", "-t", "1", "--kv-page-tokens", "16"),
        *("-ctk", "q8_0", "-ctv", "turbo4", "--kv-layer-types", "first2:f16,7:/f32,last1:turbo3/turbo2", "--json"),
    )
    arena = document_of(kvs("validate", *shape))["plan"]["minimum_arena_mib"]
    arena_flag = ("--kv-stream-arena-mib", str(arena))
    plan = document_of(kvs("validate", *shape, *arena_flag))["plan"]
    assert plan["layers_of_types"] == {"f16/f16": 2, "q8_0/turbo4": 12, "q8_0/f32": 1, "turbo3/turbo2": 1}
    assert plan["arena"]["decode"]["resident_bytes"] <= 0.1 * plan["kv_bytes"]
    document = document_of(
        kvs(
            *("kl-divergence", *shape, "-f", text, "--chunks", "1", "--max-kld", "0"),
            *(*arena_flag, "--base-kv-stream-arena-mib", "0"),
        )
    )
    assert document["kld"]["rows_identical"] == document["kld"]["rows"] == 255
    assert document["kld"]["mean"] == document["kld"]["max"] == 0
    assert document["streaming"]["bytes_streamed"] == document["streaming"]["predicted_bytes_streamed"] > 0


def test_a_side_that_streams_nothing_is_reported_and_fails_a_limit(kvs: Kvs, tiny_model: Path, text_file: Path) -> None:
    words = (
        *("kl-divergence", "-m", tiny_model, "-f", text_file, *COMMON),
        *("--kv-stream-arena-mib", "auto", "--base-kv-stream-arena-mib", "0"),
    )
    finished = kvs(*words)
    assert finished.code == 0
    assert "warning: the measured side was asked to stream and streamed nothing" in finished.err
    failed = kvs(*words, "--max-kld", "0", "--json")
    document = document_of(failed, code=1)
    assert document["idle_sides"] == ["measured"]
    assert document["kld"]["max"] == 0
    assert "streamed nothing" in document["error"]["message"]


def test_cache_types_are_compared_and_limits_decide(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    words = ("kl-divergence", "-m", tiny_model, "-f", text_file, *COMMON, "-ctk", "q8_0", "--base-ctk", "f32")
    picture = tmp_path / "out.svg"
    finished = kvs(*words, "--plot", picture)
    assert finished.code == 0, finished.err
    assert "base side: f32 keys, f16 values, arena off; measured side: q8_0 keys, f16 values, quantised rows " in (
        finished.err
    )
    assert "Rows identical: 0 of " in finished.text
    assert "<svg" in picture.read_text()
    failed = kvs(*words, "--max-mean-kld", "1e-12")
    assert failed.code == 1
    assert failed.text == finished.text
    assert "error: mean KLD " in failed.err


def test_types_of_the_base_side_hold_in_all_of_its_layers(kvs: Kvs, tiny_model: Path, text_file: Path) -> None:
    words = ("kl-divergence", "-m", tiny_model, "-f", text_file, *COMMON, "-ctk", "f32", "--chunks", "1", "--json")
    types = ("--kv-layer-types", "first1:q4_0")
    same = document_of(kvs(*words, *types))
    assert same["configuration"]["base"] == same["configuration"]["measured"]
    assert same["configuration"]["base"]["layer_types"] == ["first1:q4_0/q4_0"]
    assert same["kld"]["max"] == 0
    other = document_of(kvs(*words, *types, "--base-ctk", "f32"))
    assert (other["configuration"]["base"]["layer_types"], other["kld"]["rows_identical"]) == ([], 0)


def test_an_interrupted_comparison_gives_the_uninterrupted_document(
    kvs: Kvs, tiny_model: Path, text_file: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("kl-divergence", "-m", tiny_model, "-f", text_file, *COMMON, "-ctk", "q8_0", "--base-ctk", "f16", "--json")
    whole = kvs(*words, "--no-resume")
    assert not state_folder.exists()
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2 * 2)
        assert kvs(*words).code == 130
    assert len(list(state_folder.iterdir())) == 1
    resumed = kvs(*words)
    assert "going on with chunk 3" in resumed.err
    assert resumed.out == whole.out
    assert list(state_folder.iterdir()) == []


@pytest.mark.parametrize("name", ["read_version", "budget"])
def test_another_version_or_device_does_not_go_on_with_kept_chunks(
    kvs: Kvs, tiny_model: Path, text_file: Path, state_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    words = ("perplexity", "-m", tiny_model, "-f", text_file, *COMMON)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 2)
        if name == "read_version":
            patch.setattr(evaluation, "read_version", lambda: "0.0.9")
        else:
            patch.setattr(cpu_backend, "processor_name", lambda: "another processor")
        assert kvs(*words).code == 130
    assert len(list(state_folder.iterdir())) == 1
    fresh = kvs(*words)
    assert fresh.code == 0
    assert "going on with chunk" not in fresh.err


def test_a_state_folder_that_cannot_be_used_costs_only_a_warning(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    finished = kvs("perplexity", "-m", tiny_model, "-f", text_file, *COMMON)
    assert finished.code == 0
    assert "warning: this run cannot be resumed if it is interrupted: " in finished.err


# Documents


def keys_of(document: Any) -> set[str]:
    """Every key at every level; the percentages of ``quantiles`` are values, not names."""
    found: set[str] = set()
    for key, value in document.items():
        found.add(key)
        if isinstance(value, dict) and key != "quantiles":
            found |= keys_of(value)
    return found


def test_every_key_of_the_documents_is_documented(kvs: Kvs, tiny_model: Path, bases: dict[str, Path]) -> None:
    documents = [
        document_of(kvs("perplexity", "-m", tiny_model, "-p", "x" * 130, *COMMON, "--json")),
        document_of(kvs("kl-divergence", "-m", tiny_model, "-p", "x" * 130, *COMMON, "--json")),
        document_of(kvs("kl-divergence", "--base", bases["kvs"], "--other", bases["kvs"], "--json")),
        document_of(
            kvs("perplexity", "-m", tiny_model, "--kl-divergence", "--save-all-logits", bases["kvs"], "--json")
        ),
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    missing = {key for document in documents for key in keys_of(document) if f"`{key}`" not in text}
    assert missing == set()
