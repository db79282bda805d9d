"""What kernels promise to stay within on every device generation, and the exceptions with their reasons."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from scripts.cuda_checks.assemble import GENERATIONS, Generation, Usage, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StackException:
    """Local memory that the kernels of this name (``fnmatch``) may use on these generations."""

    name: str
    generations: tuple[Generation, ...]
    n_bytes: int
    reason: str


SMALL_STACK = 96
"""Of kernels that are no attention, such as the 32 bytes in which sines of large angles are reduced: on an H200 a few
dozen bytes of theirs cost nothing that shows, 424 cost a quarter."""

BEFORE_HOPPER = ((8, 0), (8, 6), (8, 9))
REGISTER_TILES = (
    "sums and fragments just exceed 255 registers with the assembler's schedule for these generations, and fit for 9.0 "
    "and 12.0; an H200 held to 240 registers, 32 bytes, loses 7 % of its speed; on these cards nobody has measured it"
)
SEVERAL_BLOCKS = (
    "registers are bounded so that three or four blocks share a multiprocessor, which on an H200 is faster than fewer "
    "(docs/cuda-kernels.md); on the other generations nobody has measured it yet"
)
FEW_BYTES = "the same, for 9.0 as well, with addresses of rows that are no power of two beside"
ON_12 = (
    "registers just do not suffice with the assembler's schedule for 12.0; a few bytes, with caps and sinks some "
    "more, which nobody has measured yet"
)
WIDE_TILES = (
    "sums and queries of 32 rows take up to 200 registers; the rest just exceeds 255 where tiles are converted, and "
    "outside 9.0; what that costs nobody has measured yet"
)
STACK_EXCEPTIONS = (
    StackException(name="attention_prefill_wide-*", generations=GENERATIONS, n_bytes=64, reason=WIDE_TILES),
    StackException(name="attention_decode_wide-*", generations=((12, 0),), n_bytes=16, reason=WIDE_TILES),
    StackException(name="attention_decode-q8_0-q8_0-256", generations=GENERATIONS, n_bytes=80, reason=SEVERAL_BLOCKS),
    StackException(name="attention_decode-q[45]_*-128", generations=GENERATIONS, n_bytes=40, reason=SEVERAL_BLOCKS),
    StackException(
        name="attention_decode_columns-bf16-bf16-512", generations=GENERATIONS, n_bytes=8, reason=SEVERAL_BLOCKS
    ),
    StackException(
        name="attention_decode_columns-q4_1-q4_1-512", generations=((12, 0),), n_bytes=16, reason=SEVERAL_BLOCKS
    ),
    StackException(name="gated_matvec-Q3_K-4", generations=GENERATIONS, n_bytes=144, reason=SEVERAL_BLOCKS),
    StackException(name="attention_prefill-*-80_128", generations=((9, 0),), n_bytes=8, reason=FEW_BYTES),
    StackException(name="attention_prefill-*-80_128", generations=BEFORE_HOPPER, n_bytes=64, reason=REGISTER_TILES),
    StackException(name="attention_prefill-*-128", generations=BEFORE_HOPPER, n_bytes=64, reason=REGISTER_TILES),
    StackException(name="attention_prefill_*-128", generations=BEFORE_HOPPER, n_bytes=80, reason=REGISTER_TILES),
    StackException(name="attention_prefill_*-256", generations=BEFORE_HOPPER, n_bytes=64, reason=REGISTER_TILES),
    StackException(name="attention_decode-bf16-bf16-256", generations=((12, 0),), n_bytes=8, reason=ON_12),
    StackException(name="attention_decode-iq4_nl-iq4_nl-256", generations=((12, 0),), n_bytes=8, reason=ON_12),
    StackException(name="attention_decode-q8_0-q8_0-192", generations=((12, 0),), n_bytes=8, reason=ON_12),
    StackException(name="attention_decode_window-turbo3-turbo3-128", generations=((12, 0),), n_bytes=8, reason=ON_12),
    StackException(name="attention_decode_window_capped-*", generations=((12, 0),), n_bytes=32, reason=ON_12),
    StackException(name="attention_prefill-q4_0-f16-128", generations=((12, 0),), n_bytes=16, reason=ON_12),
    StackException(name="attention_prefill_capped-*-128", generations=((12, 0),), n_bytes=40, reason=ON_12),
    StackException(name="attention_prefill_sinks-*-128", generations=((12, 0),), n_bytes=8, reason=ON_12),
    StackException(name="delta_net_*-128", generations=BEFORE_HOPPER, n_bytes=136, reason=REGISTER_TILES),
    StackException(name="attention_prefill-*-256", generations=BEFORE_HOPPER, n_bytes=64, reason=REGISTER_TILES),
)


def stack_limit(name: str, generation: Generation) -> int:
    """Bytes of local memory a thread of this kernel may use: none in attention, but for the exceptions."""
    fitting = (
        exception.n_bytes
        for exception in STACK_EXCEPTIONS
        if fnmatchcase(name, exception.name) and generation in exception.generations
    )
    return max(fitting, default=0 if name.startswith("attention") else SMALL_STACK)


def find_complaints(name: str, usage: Usage) -> Iterator[str]:
    """Every promise that this usage breaks, one line each."""
    where = f"{name} on {name_of(usage.generation)}"
    if usage.has_calls:
        yield f"{where}: a device function was not inlined"
    if usage.is_serialised:
        yield f"{where}: products of warpgroups wait for each other"
    if usage.shared_bytes > usage.shared_limit:
        yield f"{where}: {usage.shared_bytes} bytes of shared memory, at most {usage.shared_limit} are there"
    limit = stack_limit(name, usage.generation)
    if usage.stack_bytes > limit:
        yield f"{where}: {usage.stack_bytes} bytes of local memory a thread, at most {limit} are accepted"
