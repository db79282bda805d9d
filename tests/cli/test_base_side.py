"""What the --base-... flags of ``kvs kl-divergence`` make of the base side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvs_cli.arguments import read_arguments
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import KL_DIVERGENCE
from kvs_cli.kl_divergence_command import base_config_of
from kvs_cli.options import build_options
from kvs_core.cpu.backend import CpuBackend
from tests.cli.conftest import Kvs
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import make_text, write_model
from tests.fixtures.tiny_window_models import tiny_window_models

ON_CPU = ("-c", "64", "-b", "64", "--chunks", "1", "--no-resume", "--device", "cpu", "-t", "2")
STREAMING = ("-c", "512", "-b", "16", "-ub", "16", "--kv-page-tokens", "16", *ON_CPU[4:])


@pytest.fixture(scope="module")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chunks of 512 tokens."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(make_text(1100), encoding="utf-8")
    return path


def test_a_base_side_without_an_arena_needs_no_store(
    kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path
) -> None:
    arenas = ("--kv-stream-arena-mib", "auto", "--base-kv-stream-arena-mib", "0")
    finished = kvs(
        *("kl-divergence", "-m", tiny_model, "-f", text_file, *ON_CPU, *arenas),
        *("--kv-stream-store", tmp_path / "store"),
    )
    assert finished.code == 0, finished.err


def test_the_store_of_the_base_side_lies_beside_a_file_and_in_the_same_directory(tmp_path: Path) -> None:
    def base_store(store_path: Path) -> Path | None:
        words = ("-m", "model.gguf", "--kv-stream-arena-mib", "8", "--kv-stream-store", str(store_path))
        return base_config_of(build_options(read_arguments(KL_DIVERGENCE, words, FLAGS, {}))).store_path

    assert base_store(tmp_path / "store") == tmp_path / "store.base"
    assert base_store(tmp_path) == tmp_path


def test_a_store_that_only_the_base_side_needs_is_its_own(
    kvs: Kvs, deep_model: Path, long_text: Path, tmp_path: Path
) -> None:
    arenas = ("--kv-stream-arena-mib", "0", "--base-kv-stream-arena-mib", "1", "-ctk", "f32", "-ctv", "f32")
    words = ("kl-divergence", "-m", deep_model, "-f", long_text, *STREAMING, *arenas, "--json", "--max-kld", "0")
    finished = kvs(*words, "--kv-stream-store", tmp_path / "store")
    assert finished.code == 0, finished.err
    document = json.loads(finished.out)
    assert document["streaming"] is None
    assert document["base_streaming"]["bytes_streamed"] > 0
    assert list(tmp_path.iterdir()) == []
    refused = kvs(*words, "--kv-stream-store", tmp_path / "absent" / "store")
    assert refused.code == 6
    assert "error: host store" in refused.err


def test_a_store_that_the_base_side_cannot_make_is_refused_before_weights_are_read(
    kvs: Kvs, deep_model: Path, long_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuBackend, "load_weights", fail_to_load)
    (tmp_path / "store.base").write_bytes(b"precious")
    words = ("kl-divergence", "-m", deep_model, "-f", long_text, *STREAMING, "--kv-stream-arena-mib", "1")
    finished = kvs(*words, "-ctk", "f32", "-ctv", "f32", "--kv-stream-store", tmp_path / "store")
    assert finished.code == 6
    assert f"error: host store {tmp_path / 'store.base'} exists already and is not overwritten\n" in finished.err


def fail_to_load(*arguments: object) -> None:
    raise AssertionError("weights were read")


def test_a_base_side_that_does_not_fit_is_said_to_be_it(kvs: Kvs, deep_model: Path, long_text: Path) -> None:
    words = ("kl-divergence", "-m", deep_model, "-f", long_text, "-c", "512", "--kv-stream-arena-mib", "64")
    finished = kvs(*words, "--base-kv-stream-arena-mib", "1")
    assert finished.code == 4
    assert "error: base side: arena 1 MiB is too small for prefill with -ub 512" in finished.err
    assert "hint: use --base-kv-stream-arena-mib " in finished.err


def test_a_store_without_any_arena_is_refused(kvs: Kvs, tiny_model: Path, text_file: Path, tmp_path: Path) -> None:
    words = ("kl-divergence", "-m", tiny_model, "-f", text_file, *ON_CPU, "--base-kv-stream-arena-mib", "0")
    finished = kvs(*words, "--kv-stream-store", tmp_path / "store")
    assert finished.code == 2
    assert "a host store exists only when the KV cache is streamed" in finished.err


def test_the_base_side_is_refused_under_its_own_flags(kvs: Kvs, text_file: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model.gguf", tiny_latent_models()["deepseek-v2"])
    refused = kvs("kl-divergence", "-m", model, "-f", text_file, *ON_CPU, "--base-ctv", "q8_0")
    assert refused.code == 2
    assert "error: --base-ctv q8_0: the latent cache of layer 0 has its values inside its keys" in refused.err
    assert "hint: give -ctk and --base-ctv the same type\n" in refused.err


def test_a_full_size_window_beside_an_arena_of_the_base_side_names_the_base_flag(
    kvs: Kvs, text_file: Path, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model.gguf", tiny_window_models()["gemma3"])
    words = ("kl-divergence", "-m", model, "-f", text_file, *ON_CPU, "--swa-full")
    finished = kvs(*words, "--base-kv-stream-arena-mib", "8")
    assert finished.code == 2
    assert "error: --swa-full: " in finished.err
    assert "hint: leave --swa-full or --base-kv-stream-arena-mib out\n" in finished.err
