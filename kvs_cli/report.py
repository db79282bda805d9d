"""What a run measured, as llama.cpp-like lines and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvs_core.kv_cache import StreamCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds and counts of one run. Decode runs are steps of the model, one fewer than tokens generated."""

    load_seconds: float
    prompt_seconds: float
    decode_seconds: float
    total_seconds: float
    n_prompt: int
    n_generated: int
    n_decode_steps: int

    def lines(self) -> list[str]:
        n_tokens = self.n_prompt + self.n_generated
        return [
            f"       load time = {self.load_seconds * 1e3:10.2f} ms",
            f"prompt eval time = {_rate(self.prompt_seconds, self.n_prompt, 'tokens')}",
            f"       eval time = {_rate(self.decode_seconds, self.n_decode_steps, 'runs  ')}",
            f"      total time = {self.total_seconds * 1e3:10.2f} ms / {n_tokens:5d} tokens",
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "load_ms": self.load_seconds * 1e3,
            "prompt_ms": self.prompt_seconds * 1e3,
            "prompt_tokens_per_second": _per_second(self.n_prompt, self.prompt_seconds),
            "decode_ms": self.decode_seconds * 1e3,
            "decode_tokens_per_second": _per_second(self.n_decode_steps, self.decode_seconds),
            "total_ms": self.total_seconds * 1e3,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingReport:
    """The counters of a streamed run beside the time it took; ``copy_rate`` is what a large copy was measured at."""

    counters: StreamCounters
    seconds: float
    copy_rate: float | None

    @property
    def bytes_per_second(self) -> float | None:
        return _per_second(self.counters.bytes_streamed, self.seconds)

    @property
    def share_of_copy_rate(self) -> float | None:
        if self.copy_rate is None or self.bytes_per_second is None:
            return None
        return self.bytes_per_second / self.copy_rate

    def to_json(self) -> dict[str, Any]:
        """The figures beside the counters, which plan_json names."""
        return {
            "bytes_per_second": self.bytes_per_second,
            "copy_bytes_per_second": self.copy_rate,
            "share_of_copy_rate": self.share_of_copy_rate,
        }


def _per_second(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 else None


def _rate(seconds: float, count: int, unit: str) -> str:
    line = f"{seconds * 1e3:10.2f} ms / {count:5d} {unit}"
    per_second = _per_second(count, seconds)
    if count and per_second is not None:
        line += f" ({seconds * 1e3 / count:8.2f} ms per token, {per_second:8.2f} tokens per second)"
    return line
