"""llama.cpp's format: sizes, writing under a temporary name, refusing what is not whole."""

from __future__ import annotations

import errno
import io
import os
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvs_core.errors import ConfigError, FileAccessError
from kvs_core.evaluate import partial_file
from kvs_core.evaluate.chunks import plan_chunks, plan_saved_chunks
from kvs_core.evaluate.kl_divergence import compare_with_saved
from kvs_core.evaluate.logits_file import LlamaLogitsFile, LlamaLogitsWriter, LogitsFileLayout
from kvs_core.evaluate.partial_file import partial_path
from kvs_core.evaluate.perplexity import measure_perplexity
from kvs_core.evaluate.row_math import RowWorkers
from kvs_core.evaluate.saved_logits import check_base
from tests.evaluate.fake_source import N_VOCAB, FakeSource, make_text, reference_log_probs

WORKERS = RowWorkers(1)
N_CTX = 64


def write_base(path: Path, n_chunk: int = 2, source: FakeSource | None = None) -> None:
    text = make_text(n_chunk * N_CTX)
    layout = LogitsFileLayout(n_ctx=N_CTX, n_vocab=N_VOCAB, n_chunk=n_chunk)
    plan = plan_chunks(n_tokens=len(text), n_ctx=N_CTX)
    with closing(LlamaLogitsWriter(path, layout=layout, tokens=text)) as writer:
        measure_perplexity(source or FakeSource(), text, plan=plan, bos=None, workers=WORKERS, writer=writer)


@pytest.mark.parametrize(
    ("n_ctx", "n_vocab", "n_chunk", "row_codes", "n_bytes"),
    [
        # computed by hand: 20 + 4 * chunks * ctx + chunks * (ctx - 1 - ctx / 2) * (vocab to even + 4) * 2
        (8192, 151936, 1, 151940, 20 + 32768 + 4095 * 303880),
        (16384, 151936, 1, 151940, 20 + 65536 + 8191 * 303880),
        (20480, 248320, 1, 248324, 20 + 81920 + 10239 * 496648),
        (131072, 248320, 2, 248324, 20 + 1048576 + 2 * 32_547_826_680),
        (1048576, 262144, 3, 262148, 20 + 12582912 + 3 * 524287 * 524296),
        (64, 321, 2, 326, 20 + 512 + 2 * 31 * 652),
    ],
)
def test_sizes_are_exact_far_above_32_bits(
    n_ctx: int, n_vocab: int, n_chunk: int, row_codes: int, n_bytes: int
) -> None:
    layout = LogitsFileLayout(n_ctx=n_ctx, n_vocab=n_vocab, n_chunk=n_chunk)
    assert layout.row_codes == row_codes
    assert layout.n_bytes == n_bytes
    assert type(layout.n_bytes) is int
    assert layout.chunk_offset(n_chunk) - layout.chunk_offset(n_chunk - 1) == layout.chunk_bytes


def test_a_whole_context_of_codes_passes_two_to_the_31() -> None:
    layout = LogitsFileLayout(n_ctx=16384, n_vocab=151936, n_chunk=1)
    assert 16384 * layout.row_codes == 2_489_384_960


def test_written_rows_read_back_within_half_a_code_step(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    write_base(path)
    with LlamaLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=saved.n_ctx, n_present=saved.n_chunk)
        targets = plan.targets(saved.tokens, 1)
        chunk = saved.open_chunk(1)
        first = chunk.take(targets[:20], WORKERS)
        rest = chunk.take(targets[20:], WORKERS)
        exact = reference_log_probs(FakeSource(), make_text(128)[64:], begin=32)[:31]
        stored = np.concatenate([first.log_probs, rest.log_probs])
        # Entries more than 16 nats below the best one are clamped there; all others are rounded to a step.
        clamped = np.maximum(exact, exact.max(axis=1, keepdims=True) - 16)
        assert np.abs(stored - clamped).max() <= chunk.kld_floor + 4e-6  # float32 of numbers up to 30
        assert np.array_equal(np.concatenate([first.top, rest.top]), exact.argmax(axis=1))


def test_comparing_a_model_with_its_own_file_gives_the_format_s_rounding_only(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    write_base(path)
    with LlamaLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=saved.n_ctx, n_present=saved.n_chunk)
        result = compare_with_saved(FakeSource(), saved, plan=plan, bos=None, workers=WORKERS)
    assert result.statistics is not None
    assert np.abs(result.rows["kld"]).max() <= result.kld_floor
    assert result.statistics.same_top.value == 1.0

    # Targets more than 16 nats below the best token are clamped, which makes PPL(base) look better than it was.
    is_clamped = result.rows["clamped"] == 1
    assert 0 < result.statistics.n_clamped == is_clamped.sum() < len(result.rows)
    kept = result.rows[~is_clamped]
    assert kept["nll_base"] == pytest.approx(kept["nll"], abs=result.kld_floor + 4e-6)
    assert result.statistics.ppl_base.value < 0.5 * result.statistics.ppl.value
    assert not result.is_base_exact


def test_flat_rows_have_no_scale_and_still_read_back(tmp_path: Path) -> None:
    class Flat(FakeSource):
        def prefill_rows(self, tokens, *, output_begin):  # type: ignore[no-untyped-def]
            for first, rows in super().prefill_rows(tokens, output_begin=output_begin):
                yield first, np.full_like(rows, 2.5)

    path = tmp_path / "base.kld"
    write_base(path, source=Flat())
    with LlamaLogitsFile(path) as saved:
        stored = saved.open_chunk(0).take(saved.tokens[33:64], WORKERS)
    assert stored.log_probs == pytest.approx(-np.log(N_VOCAB), abs=1e-6)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1000], r"needs 40956: 1 of 2 chunks are whole"),
        (lambda data: data[:20], r"20 bytes, .* 0 of 2 chunks are whole"),
        (lambda data: data[:15], r"not a file of saved logits"),
        (lambda data: data + bytes(10), r"40966 bytes, .* needs 40956"),
        (lambda data: b"\xa0" + data[1:], r"not a file of saved logits, starts with b'\\xa0logits_'"),
        (lambda data: b"", r"not a file of saved logits"),
        (lambda data: data[:8] + struct.pack("<i", -5) + data[12:], r"header field n_ctx is -5"),
        (lambda data: data[:16] + struct.pack("<i", 0) + data[20:], r"header field n_chunk is 0"),
        (lambda data: data[:16] + struct.pack("<i", 2**31 - 1) + data[20:], r"of 2147483647 chunks are whole"),
        (lambda data: data[:20] + struct.pack("<i", N_VOCAB) + data[24:], r"field tokens holds 321"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, damage: object, message: str) -> None:
    path = tmp_path / "base.kld"
    write_base(path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(FileAccessError, match=message):
        LlamaLogitsFile(path)


@pytest.mark.parametrize(
    ("n_damaged", "damage"),
    [
        (8, struct.pack("<ff", float("nan"), -5.0)),
        (8, struct.pack("<ff", float("inf"), -5.0)),
        (8, struct.pack("<ff", 1e-4, -1e30)),
        (8, struct.pack("<ff", -1e-4, -5.0)),
        (652, bytes(652)),  # a hole that a crash of the machine left
        (652, b"\xff" * 652),
    ],
)
def test_a_row_that_is_no_distribution_is_refused(tmp_path: Path, n_damaged: int, damage: bytes) -> None:
    """The format has no hashes; without this, NaN reached the statistics and a zeroed row counted as a fine one."""
    path = tmp_path / "base.kld"
    write_base(path)
    data = bytearray(path.read_bytes())
    begin = 20 + 4 * 2 * N_CTX + 31 * 652 + 5 * 652
    data[begin : begin + n_damaged] = damage
    path.write_bytes(data)
    with LlamaLogitsFile(path) as saved:
        plan = plan_saved_chunks(n_ctx=saved.n_ctx, n_present=saved.n_chunk)
        with pytest.raises(FileAccessError, match=rf"base\.kld: damaged at byte {begin}: .* not 1"):
            compare_with_saved(FakeSource(), saved, plan=plan, bos=None, workers=WORKERS)
        with pytest.raises(FileAccessError, match=rf"base\.kld: damaged at byte {begin}: .* not 1"):
            saved.open_chunk(1).take(plan.targets(saved.tokens, 1), WORKERS)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, reason, hint in (
        (tmp_path / "absent.kld", r"absent.kld: No such file", "check the spelling"),
        (tmp_path, "Is a directory", "name a file, not a folder"),
    ):
        with pytest.raises(FileAccessError, match=reason) as refused:
            LlamaLogitsFile(path)
        assert hint in (refused.value.hint or "")


def test_another_vocabulary_context_or_text_is_refused_by_field(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    write_base(path)
    text = make_text(2 * N_CTX)
    with LlamaLogitsFile(path) as saved:
        check_base(saved, n_vocab=N_VOCAB, tokenizer=None, n_ctx=N_CTX, tokens=text)
        with pytest.raises(ConfigError, match=r"base file vocabulary 321 tokens: the model has 320"):
            check_base(saved, n_vocab=320, tokenizer=None)
        with pytest.raises(ConfigError, match=r"base file context 64: -c asks for 128"):
            check_base(saved, n_vocab=N_VOCAB, tokenizer=None, n_ctx=128)
        other = text.copy()
        other[70] += 1
        with pytest.raises(ConfigError, match=rf"base file tokens {text[70]} at 70: the text has {other[70]} there"):
            check_base(saved, n_vocab=N_VOCAB, tokenizer=None, tokens=other)
        with pytest.raises(ConfigError, match=r"base file tokens 128 tokens: the text has 100"):
            check_base(saved, n_vocab=N_VOCAB, tokenizer=None, tokens=text[:100])
        with pytest.raises(ConfigError) as caught:
            check_base(saved, n_vocab=320, tokenizer=None, n_ctx=128)
        assert len(caught.value.problems) == 2


def test_the_final_name_appears_only_when_the_file_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    source = FakeSource()
    source.stop_after_tiles = 6
    with pytest.raises(KeyboardInterrupt):
        write_base(path, source=source)
    assert not path.exists()
    assert partial_path(path).exists()
    write_base(path)
    assert path.exists()
    assert not partial_path(path).exists()


def test_an_older_file_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(b"older")
    source = FakeSource()
    source.stop_after_tiles = 2
    with pytest.raises(KeyboardInterrupt):
        write_base(path, source=source)
    assert path.read_bytes() == b"older"


def test_missing_space_is_refused_before_any_forward_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk:
        f_bavail, f_frsize = 10, 4096

    monkeypatch.setattr(partial_file.os, "statvfs", lambda _: FullDisk)
    path = tmp_path / "base.kld"
    layout = LogitsFileLayout(n_ctx=131072, n_vocab=248320, n_chunk=2)
    with pytest.raises(FileAccessError, match=r"needs 65096701956 bytes more, 40960 are free"):
        LlamaLogitsWriter(path, layout=layout, tokens=np.zeros(0, np.int32))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_no_final_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills up after the check, in the middle of the second chunk."""
    path = tmp_path / "base.kld"
    room = 31 * 652 + 5000
    original = partial_file.write_all

    def write_all(file: io.FileIO, data: bytes) -> None:
        nonlocal room
        room -= memoryview(data).nbytes
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(file, data)

    monkeypatch.setattr(partial_file, "write_all", write_all)
    with pytest.raises(FileAccessError, match=r"base\.kld\.partial: No space left on device") as caught:
        write_base(path)
    assert caught.value.hint is not None
    assert "run the same command again" in caught.value.hint
    assert not path.exists()
    assert partial_path(path).stat().st_size > 31 * 652, "the finished chunk is kept"


def test_what_is_no_regular_file_is_neither_written_nor_removed(tmp_path: Path) -> None:
    fifo = partial_path(tmp_path / "base.kld")
    os.mkfifo(fifo)
    with pytest.raises(FileAccessError, match=r"base\.kld\.partial: is not a regular file"):
        write_base(tmp_path / "base.kld")
    assert fifo.is_fifo()


def test_a_missing_folder_and_a_folder_as_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileAccessError, match="there is no folder"):
        write_base(tmp_path / "absent" / "base.kld")
    with pytest.raises(FileAccessError, match="is a directory"):
        write_base(tmp_path)


def test_two_runs_cannot_write_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    layout = LogitsFileLayout(n_ctx=N_CTX, n_vocab=N_VOCAB, n_chunk=2)
    text = make_text(128)
    writer = LlamaLogitsWriter(path, layout=layout, tokens=text)
    with pytest.raises(FileAccessError, match="another run is writing it"):
        LlamaLogitsWriter(path, layout=layout, tokens=text)
    writer.close()
    LlamaLogitsWriter(path, layout=layout, tokens=text).close()


def test_nan_logits_never_reach_the_file(tmp_path: Path) -> None:
    path = tmp_path / "base.kld"
    text = make_text(3 * N_CTX)
    text[N_CTX + 50] = 0
    source = FakeSource()
    source.poison_token = 0
    layout = LogitsFileLayout(n_ctx=N_CTX, n_vocab=N_VOCAB, n_chunk=3)
    writer = LlamaLogitsWriter(path, layout=layout, tokens=text)
    plan = plan_chunks(n_tokens=len(text), n_ctx=N_CTX)
    result = measure_perplexity(source, text, plan=plan, bos=None, workers=WORKERS, writer=writer)
    writer.close()
    assert result.non_finite is not None
    assert not path.exists()
    assert os.path.getsize(partial_path(path)) < layout.chunk_offset(2)


@pytest.mark.big
def test_a_file_above_four_gib_has_exactly_the_computed_length(tmp_path: Path) -> None:
    n_ctx, n_vocab = 16384, 262144
    layout = LogitsFileLayout(n_ctx=n_ctx, n_vocab=n_vocab, n_chunk=1)
    status = os.statvfs(tmp_path)
    if status.f_bavail * status.f_frsize < layout.n_bytes + (1 << 30):
        pytest.skip(f"needs {layout.n_bytes} bytes of disk")
    text = make_text(n_ctx, n_vocab=n_vocab)
    path = tmp_path / "base.kld"
    writer = LlamaLogitsWriter(path, layout=layout, tokens=text)
    plan = plan_saved_chunks(n_ctx=n_ctx, n_present=1)
    with RowWorkers() as workers:
        measure_perplexity(
            FakeSource(n_vocab=n_vocab, tile_rows=32), text, plan=plan, bos=None, workers=workers, writer=writer
        )
        assert path.stat().st_size == layout.n_bytes == 20 + 65536 + 8191 * 524296
        with LlamaLogitsFile(path) as saved:
            stored = saved.open_chunk(0)
            for begin in range(0, 8191, 512):
                stored.take(text[8193 + begin : 8193 + min(begin + 512, 8191)][:16], workers)
    path.unlink()
