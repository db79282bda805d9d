"""Logits to one token: llama.cpp's sampler chain on the host. No tokenizer, no text, no device.

The order of the steps is the order of ``SamplingConfig.samplers``; the last step is always one draw from what is
left. The draw uses the Mersenne Twister the way llama.cpp does, so equal logits and an equal seed give equal
tokens in both programs.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvs_core.config import SamplingConfig
from kvs_core.errors import CheckFailedError, ConfigError, Problem

Float64Array = NDArray[np.float64]
Int64Array = NDArray[np.int64]

SEED_MAX = 2**32 - 2
"""Largest seed; llama.cpp reserves 2**32 - 1 for "draw one"."""

GREEDY_TEMPERATURE = 1e-6
"""At or below this the best token is taken: float32 logits near 20 are 2e-6 apart, so any difference wins already."""

TOP_P_FIRST_CANDIDATES = 256
"""How many best candidates top-p sorts before it has to sort all of them; enough for nearly every trained model."""

SAMPLER_LETTERS: Mapping[str, str] = {
    "e": "penalties",
    "k": "top_k",
    "p": "top_p",
    "m": "min_p",
    "t": "temperature",
}
"""llama.cpp's one-letter names, for ``--sampling-seq``."""


def draw_seed() -> int:
    """A fresh seed from the operating system's entropy, in ``0..SEED_MAX``."""
    return secrets.randbelow(SEED_MAX + 1)


@dataclass(slots=True)
class _Candidates:
    """Tokens still in play. ``ids`` rise unless ``is_sorted``, then ``logits`` fall (equal ones by rising id)."""

    ids: Int64Array
    logits: Float64Array
    is_sorted: bool = False

    def keep(self, index: Int64Array | slice) -> None:
        self.ids = self.ids[index]
        self.logits = self.logits[index]

    def best(self, k: int) -> Int64Array:
        """Places of the ``k`` best candidates, best first; ties go to the lower id."""
        n = len(self.ids)
        if self.is_sorted or k >= n:
            places = np.arange(min(k, n))
        else:
            threshold = np.partition(self.logits, n - k)[n - k]
            above = np.flatnonzero(self.logits > threshold)
            equal = np.flatnonzero(self.logits == threshold)[: k - len(above)]
            places = np.sort(np.concatenate((above, equal)))
        if self.is_sorted:
            return places
        order: Int64Array = places[np.argsort(-self.logits[places], kind="stable")]
        return order


class Sampler:
    """Chooses tokens for one sequence and remembers the recent ones for the repeat penalty.

    n_vocab  length of every logits array
    n_ctx    what ``repeat_last_n`` -1 stands for
    eog_ids  end-of-generation tokens; never chosen under ``ignore_eos``
    Raises   ConfigError for an unknown sampler name.
    """

    def __init__(
        self,
        config: SamplingConfig,
        *,
        n_vocab: int,
        n_ctx: int,
        eog_ids: Iterable[int] = (),
    ) -> None:
        self._steps = _build_steps(config)
        self._config = config
        self._n_vocab = n_vocab
        self.seed = draw_seed() if config.seed is None else config.seed
        self._random = np.random.RandomState(self.seed)
        n_recent = n_ctx if config.repeat_last_n < 0 else config.repeat_last_n
        self._recent: deque[int] = deque(maxlen=n_recent)
        self._banned = np.array(sorted(eog_ids) if config.ignore_eos else (), dtype=np.int64)

    def accept(self, tokens: Sequence[int]) -> None:
        """Remember tokens of the prompt, or the one just sampled, for the repeat penalty."""
        self._recent.extend(tokens)

    def sample(self, logits: NDArray[np.float32], *, pos: int) -> int:
        """The next token.

        logits  float32 [n_vocab], not changed
        pos     position whose logits these are; only named in errors
        Raises  CheckFailedError when a logit is NaN or infinite, or no token is left to choose from.
        """
        candidates = self._start(logits, pos)
        for step in self._steps:
            step(self, candidates)
        return self._draw(candidates)

    def _start(self, logits: NDArray[np.float32], pos: int) -> _Candidates:
        if logits.shape != (self._n_vocab,):
            raise ValueError(f"logits have shape {logits.shape}, expected ({self._n_vocab},)")
        if not np.isfinite(logits.max()):  # the maximum of an array with a NaN is NaN
            worst = int(np.flatnonzero(~(logits < np.inf))[0]) if not np.all(logits == -np.inf) else 0
            raise CheckFailedError(
                f"logits at position {pos} cannot be sampled: token {worst} has {logits[worst]}",
                hint="the model's weights or the KV cache hold a value that is not finite",
            )
        values = logits.astype(np.float64)
        values[self._banned] = -np.inf
        if len(self._banned) and values.max() == -np.inf:
            raise CheckFailedError(f"no token can be chosen at position {pos}: every one is an ignored end token")
        return _Candidates(ids=np.arange(self._n_vocab), logits=values)

    def _apply_penalties(self, candidates: _Candidates) -> None:
        penalty = self._config.repeat_penalty
        if penalty == 1.0 or not self._recent:
            return
        places = np.flatnonzero(np.isin(candidates.ids, np.fromiter(set(self._recent), dtype=np.int64)))
        logits = candidates.logits[places]
        # Dividing a negative logit would make the token more likely, so those are multiplied.
        candidates.logits[places] = np.where(logits <= 0.0, logits * penalty, logits / penalty)
        if candidates.is_sorted:
            order = np.lexsort((candidates.ids, -candidates.logits))
            candidates.keep(order)

    def _apply_top_k(self, candidates: _Candidates) -> None:
        k = self._config.top_k
        if k <= 0 or (candidates.is_sorted and k >= len(candidates.ids)):
            return
        candidates.keep(candidates.best(k))
        candidates.is_sorted = True

    def _apply_top_p(self, candidates: _Candidates) -> None:
        if self._config.top_p >= 1.0:
            return
        weights = np.exp(candidates.logits - candidates.logits.max())
        target = self._config.top_p * weights.sum()
        n = len(weights)
        for n_sorted in dict.fromkeys((min(TOP_P_FIRST_CANDIDATES, n), n)):
            places = candidates.best(n_sorted)
            n_below = int(np.searchsorted(np.cumsum(weights[places]), target))
            if n_below < n_sorted:
                break
        candidates.keep(places[: n_below + 1])
        candidates.is_sorted = True

    def _apply_min_p(self, candidates: _Candidates) -> None:
        if self._config.min_p <= 0.0:
            return
        candidates.keep(np.flatnonzero(candidates.logits >= candidates.logits.max() + np.log(self._config.min_p)))

    def _apply_temperature(self, candidates: _Candidates) -> None:
        if self._config.temperature <= GREEDY_TEMPERATURE:
            best = int(np.argmax(candidates.logits))  # the first of equal ones, which is the lowest id
            candidates.keep(slice(best, best + 1))
        else:
            candidates.logits = candidates.logits / self._config.temperature

    def _draw(self, candidates: _Candidates) -> int:
        """One draw in proportion to exp(logit); uses one double of the generator even when one token is left."""
        share = int.from_bytes(self._random.bytes(8), "little") / 2**64
        cumulative = np.cumsum(np.exp(candidates.logits - candidates.logits.max()))
        place = int(np.searchsorted(cumulative, share * cumulative[-1]))
        # A share of exactly 0 lands on the first candidate even if its weight is 0: move to one that can be chosen.
        while cumulative[place] == 0.0:
            place += 1
        return int(candidates.ids[min(place, len(candidates.ids) - 1)])


_STEPS: Mapping[str, Callable[[Sampler, _Candidates], None]] = {
    "penalties": Sampler._apply_penalties,
    "top_k": Sampler._apply_top_k,
    "top_p": Sampler._apply_top_p,
    "min_p": Sampler._apply_min_p,
    "temperature": Sampler._apply_temperature,
}

SAMPLER_NAMES: tuple[str, ...] = tuple(_STEPS)
"""What ``SamplingConfig.samplers`` may hold; a name left out switches that step off."""


def _build_steps(config: SamplingConfig) -> list[Callable[[Sampler, _Candidates], None]]:
    unknown = [name for name in config.samplers if name not in _STEPS]
    if unknown:
        raise ConfigError(
            [
                Problem(field="samplers", value=name, reason=f"not a sampler; known: {', '.join(SAMPLER_NAMES)}")
                for name in unknown
            ]
        )
    return [_STEPS[name] for name in config.samplers]
