"""What the --base-... flags of ``kvs kl-divergence`` make of the base side."""

from __future__ import annotations

from pathlib import Path

from kvs_cli.arguments import read_arguments
from kvs_cli.flag_table import FLAGS
from kvs_cli.flags import KL_DIVERGENCE
from kvs_cli.kl_divergence_command import base_config_of
from kvs_cli.options import build_options
from tests.cli.conftest import Kvs
from tests.fixtures.tiny_models import tiny_catalogue

ON_CPU = ("-c", "64", "-b", "64", "--chunks", "1", "--no-resume", "--device", "cpu", "-t", "2")


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


def test_the_base_side_is_refused_under_its_own_flags(kvs: Kvs, text_file: Path, tmp_path: Path) -> None:
    model = tiny_catalogue()["head-dim-80"](tmp_path / "model.gguf")
    words = ("kl-divergence", "-m", model, "-f", text_file, *ON_CPU)
    refused = kvs(*words, "--base-ctk", "q8_0")
    assert refused.code == 2
    assert "error: --base-ctk q8_0: the head size 80 of layer 0 is not a multiple of the block of" in refused.err
    assert "hint: use --base-ctk f16\n" in refused.err
