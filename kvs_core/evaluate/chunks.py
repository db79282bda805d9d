"""How a text is cut into chunks and which rows are scored: llama-perplexity's rules, as integers.

No logits here; ``perplexity`` and ``kl_divergence`` walk the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.errors import ConfigError, Problem
from kvs_core.units import align_up, ceil_div

N_CTX_MIN = 3
"""A chunk of three tokens scores one row; two tokens would score none."""

STRIDE_CONTEXT_ALIGNMENT = 256
"""llama.cpp rounds the context it allocates up to this, and stride mode scores against the rounded one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlan:
    """Chunks of ``n_ctx`` tokens; ``step`` tokens from one to the next, ``first..n_ctx - 1`` scored in each.

    Plain mode: chunks follow each other, the second half is scored, and the row of token i predicts token i + 1::

        | not scored: 0 .. n_ctx/2 | rows n_ctx/2 .. n_ctx - 2 | last token: only a target |

    Stride mode: windows overlap, and only the last ``step`` predictions of each are scored.
    """

    n_ctx: int
    n_chunk: int
    first: int
    step: int
    is_strided: bool

    @property
    def rows_per_chunk(self) -> int:
        return self.n_ctx - 1 - self.first

    @property
    def n_rows(self) -> int:
        return self.n_chunk * self.rows_per_chunk

    def original_tokens(self, tokens: NDArray[np.int32], chunk_idx: int) -> NDArray[np.int32]:
        """The text's own tokens of a chunk: int32 [n_ctx], a view."""
        begin = chunk_idx * self.step
        return tokens[begin : begin + self.n_ctx]

    def input_tokens(self, tokens: NDArray[np.int32], chunk_idx: int, bos: int | None) -> NDArray[np.int32]:
        """What the model reads: in plain mode ``bos`` stands in the first token's place, unless it is None.

        In stride mode llama-perplexity puts BOS in place only after the window has been computed, so in effect it
        never does; its numbers are matched.
        """
        chunk = self.original_tokens(tokens, chunk_idx).copy()
        if bos is not None and not self.is_strided:
            chunk[0] = bos
        return chunk

    def targets(self, tokens: NDArray[np.int32], chunk_idx: int) -> NDArray[np.int32]:
        """The token that each scored row predicts: int32 [rows_per_chunk]."""
        return self.original_tokens(tokens, chunk_idx)[self.first + 1 :]


def plan_chunks(*, n_tokens: int, n_ctx: int, n_chunks: int = -1, stride: int = 0) -> ChunkPlan:
    """Cut ``n_tokens`` into chunks; ``n_chunks`` -1 takes all there are, ``stride`` 0 is the plain mode.

    Raises  ConfigError naming what is present and what is needed, all problems at once.
    """
    problems = [*_check_context(n_ctx, stride), *check_chunk_request(n_chunks)]
    if problems:
        raise ConfigError(problems)
    window = stride_window(n_ctx=n_ctx, stride=stride) if stride else n_ctx
    needed = 2 * window
    if n_tokens < needed:
        raise ConfigError(
            f"text has {n_tokens} tokens, needs at least {needed} for a context of {window}",
            hint=f"use a longer text, or lower -c to at most {n_tokens // 2}"
            if n_tokens // 2 >= N_CTX_MIN and not stride
            else "use a longer text",
        )
    present = ceil_div(n_tokens - window, stride) if stride else n_tokens // window
    return ChunkPlan(
        n_ctx=window,
        n_chunk=resolve_chunk_count(n_chunks, present=present),
        first=window - 1 - stride if stride else window // 2,
        step=stride or window,
        is_strided=stride > 0,
    )


def plan_saved_chunks(*, n_ctx: int, n_present: int, n_chunks: int = -1) -> ChunkPlan:
    """The plan of a comparison against a file of ``n_present`` chunks; ``n_chunks`` as in :func:`plan_chunks`."""
    problems = check_chunk_request(n_chunks)
    if problems:
        raise ConfigError(problems)
    return ChunkPlan(
        n_ctx=n_ctx,
        n_chunk=resolve_chunk_count(n_chunks, present=n_present),
        first=n_ctx // 2,
        step=n_ctx,
        is_strided=False,
    )


def stride_window(*, n_ctx: int, stride: int) -> int:
    """Tokens of one window in stride mode: half a stride is added, and llama.cpp's rounding applied."""
    return align_up(n_ctx + stride // 2, STRIDE_CONTEXT_ALIGNMENT)


def check_chunk_request(n_chunks: int) -> list[Problem]:
    """``--chunks`` accepts -1 (all) and positive counts."""
    if n_chunks == -1 or n_chunks >= 1:
        return []
    return [
        Problem(
            field="--chunks", value=str(n_chunks), reason="must be -1 (all chunks) or at least 1", hint="leave it out"
        )
    ]


def resolve_chunk_count(n_chunks: int, *, present: int) -> int:
    """The number of chunks to run; asking for more than there are is refused with both numbers."""
    if n_chunks > present:
        raise ConfigError(
            f"--chunks {n_chunks}: only {present} chunks are present", hint=f"use --chunks {present} or leave it out"
        )
    return present if n_chunks == -1 else n_chunks


def _check_context(n_ctx: int, stride: int) -> list[Problem]:
    problems = []
    if n_ctx < N_CTX_MIN:
        problems.append(
            Problem(
                field="-c",
                value=str(n_ctx),
                reason=f"perplexity needs a context of at least {N_CTX_MIN}",
                hint="raise -c",
            )
        )
    if stride < 0:
        problems.append(
            Problem(
                field="--ppl-stride", value=str(stride), reason="must be 0 (off) or at least 1", hint="leave it out"
            )
        )
    elif n_ctx >= N_CTX_MIN and stride >= n_ctx:
        problems.append(
            Problem(
                field="--ppl-stride",
                value=str(stride),
                reason=f"must be below the context of {n_ctx}",
                hint="lower --ppl-stride or raise -c",
            )
        )
    return problems
