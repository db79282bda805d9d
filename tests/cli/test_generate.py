"""The generation loop on a scripted session: where it ends, what is shown, how many steps it takes (U13, U26)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from kvs_cli.generate import Generation, StopReason
from kvs_core.config import SamplingConfig
from kvs_core.detokenizer import Detokenizer
from kvs_core.errors import StateError
from kvs_core.sampling import Sampler

N_VOCAB = 300
END = 256
SECOND_BEST = 299
GREEDY = SamplingConfig(seed=1, temperature=0.0)


class ByteVocabulary:
    """Token n is the byte n; tokens from 256 on add nothing."""

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""


class ScriptedSession:
    """Whatever is put in, the logits favour the next token of the script."""

    def __init__(self, script: Sequence[int], *, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.n_past = 0
        self.n_decodes = 0
        self._script = list(script)

    def prefill(self, tokens: Sequence[int]) -> np.ndarray:
        return self._append(tokens)

    def decode(self, tokens: Sequence[int]) -> np.ndarray:
        self.n_decodes += 1
        return self._append(tokens)[None]

    def _append(self, tokens: Sequence[int]) -> np.ndarray:
        if self.n_past + len(tokens) > self.n_ctx:
            raise StateError("beyond the context")
        self.n_past += len(tokens)
        logits = np.zeros(N_VOCAB, dtype=np.float32)
        logits[SECOND_BEST] = 1.0
        if self._script:
            logits[self._script.pop(0)] = 10.0
        return logits


def generate(
    script: Sequence[int],
    *,
    n_prompt: int = 4,
    n_ctx: int = 64,
    n_predict: int = -1,
    stop_texts: Sequence[str] = (),
    config: SamplingConfig = GREEDY,
) -> tuple[Generation, ScriptedSession, list[str]]:
    session = ScriptedSession(script, n_ctx=n_ctx)
    generation = Generation(
        session,
        Sampler(config, n_vocab=N_VOCAB, n_ctx=n_ctx, eog_ids=[END]),
        Detokenizer(ByteVocabulary()),
        stop_texts=stop_texts,
        end_ids=[END],
        n_predict=n_predict,
    )
    pieces = list(generation.pieces([65] * n_prompt))
    return generation, session, pieces


def test_an_end_token_ends_the_text_and_is_not_shown() -> None:
    generation, session, pieces = generate([*b"hello", END, *b"more"])
    assert "".join(pieces) == "hello"
    assert generation.stop_reason is StopReason.END_TOKEN
    assert generation.token_ids == list(b"hello")
    assert generation.decoded_ids == list(b"hello")
    assert session.n_decodes == 5


def test_an_ignored_end_token_is_never_chosen() -> None:
    generation, _, _ = generate([END, END, END], n_predict=3, config=replace(GREEDY, ignore_eos=True))
    assert generation.token_ids == [SECOND_BEST] * 3
    assert generation.stop_reason is StopReason.LENGTH


@pytest.mark.parametrize(("n_predict", "expected"), [(0, ""), (1, "h"), (3, "hel")])
def test_n_tokens_take_one_step_fewer(n_predict: int, expected: str) -> None:
    generation, session, pieces = generate(b"hello", n_predict=n_predict)
    assert "".join(pieces) == expected
    assert generation.stop_reason is StopReason.LENGTH
    assert session.n_decodes == max(0, n_predict - 1)


@pytest.mark.parametrize("n_predict", [-1, -2, 100])
@pytest.mark.parametrize(("n_prompt", "n_expected"), [(64, 0), (63, 1), (62, 2), (1, 63)])
def test_prompt_and_text_fill_the_context_exactly(n_prompt: int, n_expected: int, n_predict: int) -> None:
    generation, session, pieces = generate(b"x" * 80, n_prompt=n_prompt, n_ctx=64, n_predict=n_predict)
    assert "".join(pieces) == "x" * n_expected
    assert generation.stop_reason is StopReason.CONTEXT_FULL
    assert session.n_past == n_prompt + max(0, n_expected - 1)


def test_a_length_reached_with_the_context_counts_as_length() -> None:
    generation, _, _ = generate(b"x" * 80, n_prompt=60, n_ctx=64, n_predict=4)
    assert generation.stop_reason is StopReason.LENGTH
    assert len(generation.token_ids) == 4


@pytest.mark.parametrize("stop", ["lo w", "l"])
def test_a_stop_text_ends_the_text_before_it(stop: str) -> None:
    text = "hello world"
    generation, _, pieces = generate(text.encode(), stop_texts=["zzz", stop])
    assert "".join(pieces) == text[: text.index(stop)]
    assert generation.stop_reason is StopReason.STOP_TEXT
    assert generation.stop_text == stop


def test_text_held_back_for_a_stop_text_comes_out_at_the_end() -> None:
    _, _, pieces = generate([*b"abc", END], stop_texts=["bcd"])
    assert "".join(pieces) == "abc"


def test_characters_of_several_tokens_are_shown_whole() -> None:
    _, _, pieces = generate([*"🦙é".encode(), END])
    assert [piece for piece in pieces if piece] == ["🦙", "é"]


def test_a_cut_off_character_becomes_a_replacement_mark() -> None:
    _, _, pieces = generate([*"🦙".encode()[:3]], n_predict=3)
    assert "".join(pieces) == "\ufffd"


def test_what_is_held_back_can_be_flushed_when_the_run_is_cut_short() -> None:
    session = ScriptedSession(b"abc", n_ctx=64)
    sampler = Sampler(GREEDY, n_vocab=N_VOCAB, n_ctx=64)
    generation = Generation(session, sampler, Detokenizer(ByteVocabulary()), stop_texts=["abcd"])
    pieces = generation.pieces([65])
    assert [next(pieces) for _ in range(3)] == ["", "", ""]
    assert generation.flush() == "abc"


def test_sampling_sees_prompt_and_answer_for_the_repeat_penalty() -> None:
    session = ScriptedSession([65, 66, 66], n_ctx=64)
    sampler = Sampler(replace(GREEDY, repeat_penalty=1e6, repeat_last_n=1), n_vocab=N_VOCAB, n_ctx=64)
    generation = Generation(session, sampler, Detokenizer(ByteVocabulary()), n_predict=3)
    list(generation.pieces([65]))
    assert generation.token_ids == [SECOND_BEST, 66, SECOND_BEST]
