"""Our own base format: what a row keeps, how exactly a comparison comes out, and damage."""

from __future__ import annotations

import hashlib
import json
import struct
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks
from kvs_core.evaluate.compact_codec import (
    KLD_FLOOR_TARGET,
    hash_row,
    pack_levels,
    quantisation_step,
    unpack_levels,
)
from kvs_core.evaluate.compact_file import CompactLogitsFile
from kvs_core.evaluate.compact_layout import COMPACT_MAGIC, CompactHeader, make_compact_header
from kvs_core.evaluate.compact_writer import CompactLogitsWriter
from kvs_core.evaluate.kl_divergence import compare_sources, compare_with_saved
from kvs_core.evaluate.logits_file import LogitsFileLayout
from kvs_core.evaluate.partial_file import partial_path
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.saved_logits import LogitsIdentity, check_base, check_pair
from tests.evaluate.fake_source import N_VOCAB, FakeSource, make_text, reference_log_probs

WORKERS = RowWorkers(1)
N_CTX = 64
IDENTITY = LogitsIdentity(model="model-hash", tokenizer="tokenizer-hash", type_k="f16", type_v="q8_0")


def write_base(path: Path, *, n_chunk: int = 2, n_vocab: int = N_VOCAB, source: FakeSource | None = None) -> None:
    text = make_text(n_chunk * N_CTX, n_vocab=n_vocab)
    header = make_compact_header(n_ctx=N_CTX, n_chunk=n_chunk, n_vocab=n_vocab, tokens=text, identity=IDENTITY)
    plan = plan_chunks(n_tokens=len(text), n_ctx=N_CTX)
    source = source or FakeSource(n_vocab=n_vocab)
    with closing(CompactLogitsWriter(path, header=header, tokens=text)) as writer:
        measure_perplexity(source, text, plan=plan, bos=None, workers=WORKERS, writer=writer)


@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 65535)), min_size=1, max_size=400))
@settings(max_examples=200)
def test_levels_survive_packing(values: list[int]) -> None:
    levels = np.array([1, *values], np.uint16)
    unpacked = np.empty_like(levels)
    unpack_levels(pack_levels(levels), unpacked)
    assert np.array_equal(levels, unpacked)


@pytest.mark.parametrize("payload", [b"", b"\xff\xff\xff", pack_levels(np.ones(5, np.uint16))])
def test_a_payload_of_another_row_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="row"):
        unpack_levels(payload, np.empty(6, np.uint16))


@pytest.mark.parametrize("n_vocab", [2, 321, 49152, 248320, 1_000_000])
def test_the_largest_level_fits_sixteen_bits(n_vocab: int) -> None:
    assert round(1 / quantisation_step(n_vocab)) <= 65535


@pytest.mark.parametrize("sharpness", [0.01, 1.0, 3.0, 30.0])
def test_stored_rows_are_distributions_within_the_stated_floor(tmp_path: Path, sharpness: float) -> None:
    path = tmp_path / "base.kvs"
    source = FakeSource(sharpness=sharpness)
    write_base(path, source=source)
    with CompactLogitsFile(path) as saved:
        chunk = saved.open_chunk(0)
        stored = chunk.take(saved.tokens[33:64], WORKERS)
    exact = reference_log_probs(source, make_text(128)[:64], begin=32)[:31]
    probabilities = np.exp(stored.log_probs)
    assert probabilities.sum(axis=1) == pytest.approx(1.0, abs=1e-6)  # the tail's mean is a float32 logarithm
    divergence = (probabilities * (stored.log_probs - exact)).sum(axis=1)
    # logits are float32 of size 30 at most: ln p is known to 4e-6
    assert divergence.max() <= chunk.kld_floor + 4e-6
    assert chunk.kld_floor <= 2 * KLD_FLOOR_TARGET
    assert np.array_equal(stored.top, exact.argmax(axis=1))
    assert stored.nll == pytest.approx(-exact[np.arange(31), saved.tokens[33:64]], abs=4e-6)


def test_ppl_of_the_base_is_exact_where_llama_s_format_clamps(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    with CompactLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=N_CTX, n_present=2)
        result = compare_with_saved(FakeSource(), saved, plan=plan, bos=None, workers=WORKERS)
    assert result.statistics is not None
    assert result.is_base_exact
    assert result.statistics.ppl_base.value == result.statistics.ppl.value
    assert result.statistics.n_clamped == 0


def test_an_identical_run_is_proved_by_hashes_and_diverges_by_exactly_zero(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    with CompactLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=N_CTX, n_present=2)
        result = compare_with_saved(FakeSource(tile_rows=5), saved, plan=plan, bos=None, workers=WORKERS)
    statistics = result.statistics
    assert statistics is not None
    assert statistics.n_identical == statistics.n_rows == 62
    assert statistics.kld.maximum == statistics.kld.minimum == 0.0
    assert statistics.p_diff.maximum == 0.0
    assert statistics.same_top.value == 1.0


def test_one_changed_bit_of_one_logit_is_one_row_that_differs(tmp_path: Path) -> None:
    class OneBit(FakeSource):
        def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
            for first, rows in super().prefill_rows(tokens, output_begin=output_begin):
                if first <= 50 < first + len(rows):
                    rows.view(np.uint32)[50 - first, 17] ^= 1
                yield first, rows

    path = tmp_path / "base.kvs"
    write_base(path)
    with CompactLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=N_CTX, n_present=2, n_chunks=1)
        result = compare_with_saved(OneBit(), saved, plan=plan, bos=None, workers=WORKERS)
    assert result.statistics is not None
    assert result.statistics.n_identical == 30
    assert np.flatnonzero(result.rows["identical"] == 0).tolist() == [50 - 32]


@pytest.mark.parametrize("noise", [1e-4, 1e-3, 1e-2])
def test_divergence_from_the_file_equals_that_from_exact_logits(tmp_path: Path, noise: float) -> None:
    """The rounding error is unbiased and near step * sqrt(2 D / 3): five times that is allowed for each row."""
    path = tmp_path / "base.kvs"
    n_vocab = 5000
    base, other = FakeSource(n_vocab=n_vocab), FakeSource(n_vocab=n_vocab, noise=noise)
    write_base(path, n_vocab=n_vocab)
    text = make_text(2 * N_CTX, n_vocab=n_vocab)
    plan = plan_chunks(n_tokens=len(text), n_ctx=N_CTX)
    exact = compare_sources(base, other, text, plan=plan, bos=None, workers=WORKERS)
    with CompactLogitsFile(path) as saved:
        stored = compare_with_saved(other, saved, plan=plan, bos=None, workers=WORKERS)
    error = stored.rows["kld"] - exact.rows["kld"]
    allowed = 5 * quantisation_step(n_vocab) * np.sqrt(2 / 3 * np.maximum(exact.rows["kld"], 0)) + 1e-9
    assert (np.abs(error) <= allowed).all(), f"worst {np.max(np.abs(error) / allowed)} at {np.argmax(np.abs(error))}"
    assert abs(error.mean()) <= allowed.mean() / np.sqrt(len(error))
    assert np.array_equal(stored.rows["same_top"], exact.rows["same_top"])
    assert np.array_equal(stored.rows["nll_base"], exact.rows["nll_base"])


def test_the_file_is_less_than_a_third_of_llama_s_for_peaked_rows(tmp_path: Path) -> None:
    """Real figures come from real models (scripts/measure_kld_format.py); this guards the packing itself."""
    path = tmp_path / "base.kvs"
    n_vocab = 20000
    write_base(path, n_vocab=n_vocab)
    assert path.stat().st_size < LogitsFileLayout(n_ctx=N_CTX, n_vocab=n_vocab, n_chunk=2).n_bytes / 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1000], r"1 of 2 chunks are whole"),
        (lambda data: data[:-1], r"2 of 2 chunks are whole"),
        (lambda data: data + bytes(10), r"does not end with the index"),
        (lambda data: data[:40], r"header does not match its hash"),
        (lambda data: data[:11], r"not a file of kvs logits"),
        (lambda data: b"\xeb" + data[1:], r"not a file of kvs logits"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], r"header does not match its hash"),
    ],
)
def test_a_damaged_file_is_refused_when_opened(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(FileAccessError, match=message):
        CompactLogitsFile(path)


def test_a_file_from_before_layer_types_and_rotation_were_kept_is_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to_old_bytes(header: CompactHeader) -> bytes:
        fields = asdict(header)
        del fields["identity"]["layer_types"], fields["identity"]["kv_rotate"]
        text = json.dumps(fields, sort_keys=True).encode()
        return COMPACT_MAGIC + struct.pack("<I", len(text)) + text + hashlib.sha256(text).digest()

    path = tmp_path / "base.kvs"
    with monkeypatch.context() as patch:
        patch.setattr(CompactHeader, "to_bytes", to_old_bytes)
        write_base(path)
    with CompactLogitsFile(path) as saved:
        assert saved.identity == IDENTITY
        assert saved.identity.describe_cache() == "f16 keys, q8_0 values"
        result = compare_with_saved(
            FakeSource(), saved, plan=plan_saved_chunks(n_ctx=N_CTX, n_present=2), bos=None, workers=WORKERS
        )
        assert result.statistics is not None
        assert result.statistics.kld.maximum == 0
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(FileAccessError, match="1 of 2 chunks are whole"):
        CompactLogitsFile(path)


def test_changed_tokens_are_refused_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    data = bytearray(path.read_bytes())
    at = bytes(data).index(make_text(128).astype("<i4").tobytes())
    data[at + 4] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FileAccessError, match="field tokens does not match"):
        CompactLogitsFile(path)


def test_a_flipped_byte_in_a_row_is_damage_and_not_a_divergence(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    data = bytearray(path.read_bytes())
    data[-800] ^= 0x10
    path.write_bytes(bytes(data))
    with CompactLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=N_CTX, n_present=2)
        with pytest.raises(FileAccessError, match=r"damaged at byte \d+, chunk 2, row 24"):
            compare_with_saved(FakeSource(), saved, plan=plan, bos=None, workers=WORKERS)


def test_another_tokenizer_is_refused_by_field(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    write_base(path)
    with CompactLogitsFile(path) as saved:
        check_base(saved, n_vocab=N_VOCAB, tokenizer="tokenizer-hash")
        with pytest.raises(ConfigError, match="base file tokenizer tokenizer-hash: the model has other-hash"):
            check_base(saved, n_vocab=N_VOCAB, tokenizer="other-hash")
        check_pair(saved, saved)


def test_nothing_is_published_while_chunks_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "base.kvs"
    source = FakeSource()
    source.stop_after_tiles = 6
    with pytest.raises(KeyboardInterrupt):
        write_base(path, source=source)
    assert not path.exists()
    text = make_text(128)
    header = make_compact_header(n_ctx=N_CTX, n_chunk=2, n_vocab=N_VOCAB, tokens=text, identity=IDENTITY)
    with closing(CompactLogitsWriter(path, header=header, tokens=text)) as writer:
        assert writer.n_complete_chunks == 1
        with pytest.raises(FileAccessError, match="1 chunks written, needs 2"):
            writer.publish()
    assert partial_path(path).exists()


def test_hashes_tell_zero_from_minus_zero() -> None:
    row = np.zeros(4, np.float32)
    assert hash_row(row) != hash_row(-row)
    assert hash_row(row) == hash_row(row.copy())
