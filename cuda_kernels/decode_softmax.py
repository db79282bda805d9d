"""The softmax of decode attention, between the products of ``decode_tiles``, in a warp's registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from numba.cuda import types

from cuda_kernels.attention_common import cap_scores
from cuda_kernels.decode_tiles import TILE_KEYS
from cuda_kernels.emit import Emitter, Value, emitted, floats, words


class TileSoftmax:
    """The softmax of one warp's tile; a lane holds the scores of keys g and 8 + g of each 16 for query rows 2t, 2t + 1.

    Attributes that are intrinsics (pairs: of query rows 2t and 2t + 1):
    cap(scores, scale_log2)              the soft cap of ``cap_scores``; scores are in units of log2 afterwards
    hide(scores, key, limits)            minus infinity outside low to high - 1; ``key``: that of g of the first 16;
                                         ``limits``: shared address of row 2t's low end, the high ones 32 bytes further
    rises(scores, maxima, scale_log2)    whether one of this lane's scores makes a maximum rise
    maxima(scores, maxima, scale_log2)   the pair of maxima to subtract, over the whole tile
    shrinks(before, after, scale_log2)   by how much sums shrink when maxima rise: exactly 1 where they stay
    weigh(scores, maxima, scale_log2)    probabilities
    add_up(probabilities, totals, shrinks)
                                         this lane's totals of both rows
    pack(probabilities)                  words of two float16, as ``ValueTile.accumulate`` takes them
    total(totals)                        the sum over all lanes of a row

    A maximum rises only when a score is above it by more than ``LAZY`` (in powers of two): sums are seldom rescaled,
    and probabilities stay below 2 ** ``LAZY``. Each row decides for itself, so its bits depend on it alone.
    """

    LAZY = 3.0

    def __init__(self, n_subs: int, softcap: float = 0.0) -> None:
        self.n_subs = n_subs
        scores, pair, f32, i32, u32 = floats(4 * n_subs), floats(2), types.float32, types.int32, types.uint32
        self.cap = emitted(scores, scores, f32)(
            lambda emit, values, scale_log2: cap_scores(emit, values, scale_log2, softcap)
        )
        self.hide = emitted(scores, scores, i32, u32)(self._hide)
        self.rises = emitted(types.boolean, scores, pair, f32)(self._rises)
        self.maxima = emitted(pair, scores, pair, f32)(self._maxima)
        self.shrinks = emitted(pair, pair, pair, f32)(self._shrinks)
        self.weigh = emitted(scores, scores, pair, f32)(self._weigh)
        self.add_up = emitted(pair, scores, pair, pair)(self._add_up)
        self.pack = emitted(words(2 * n_subs), scores)(
            lambda emit, values: [emit.transpose(emit.pack_half2(*values[i : i + 2])) for i in range(0, len(values), 2)]
        )
        self.total = emitted(pair, pair)(lambda emit, totals: [_over_keys(emit, emit.float_add, x) for x in totals])

    def _hide(self, emit: Emitter, scores: list[Value], key: Value, limits: Value) -> list[Value]:
        hidden = emit.float(float("-inf"))
        lows, highs = emit.load_shared_words(limits, 0, 2), emit.load_shared_words(limits, 32, 2)
        result = []
        for i, score in enumerate(scores):
            here = emit.add(key, TILE_KEYS * (i // 4) + 8 * (i % 4 // 2))
            recent = emit.select(emit.less(here, lows[i % 2]), hidden, score)
            result.append(emit.select(emit.less(here, highs[i % 2]), recent, hidden))
        return result

    def _rises(self, emit: Emitter, scores: list[Value], maxima: list[Value], scale_log2: Value) -> Value:
        first, second = (
            self._is_above(emit, _largest(emit, scores[row::2]), maxima[row], scale_log2) for row in range(2)
        )
        return emit.bit_or(first, second)

    def _maxima(self, emit: Emitter, scores: list[Value], maxima: list[Value], scale_log2: Value) -> list[Value]:
        result = []
        for row in range(2):
            largest = _over_keys(emit, emit.float_maximum, _largest(emit, scores[row::2]))
            rises = self._is_above(emit, largest, maxima[row], scale_log2)
            result.append(emit.select(rises, largest, maxima[row]))
        return result

    def _is_above(self, emit: Emitter, largest: Value, maximum: Value, scale_log2: Value) -> Value:
        rise = emit.float_multiply(emit.float_subtract(largest, maximum), scale_log2)
        return emit.float_less(emit.float(self.LAZY), rise)

    def _shrinks(self, emit: Emitter, before: list[Value], after: list[Value], scale_log2: Value) -> list[Value]:
        differences = (emit.float_subtract(a, b) for a, b in zip(before, after, strict=True))
        return [emit.exp2(emit.float_multiply(difference, scale_log2)) for difference in differences]

    def _weigh(self, emit: Emitter, scores: list[Value], maxima: list[Value], scale_log2: Value) -> list[Value]:
        shifts = [emit.float_multiply(emit.float_negate(maximum), scale_log2) for maximum in maxima]
        return [emit.exp2(emit.fma(score, scale_log2, shifts[i % 2])) for i, score in enumerate(scores)]

    def _add_up(self, emit: Emitter, values: list[Value], totals: list[Value], shrinks: list[Value]) -> list[Value]:
        result = []
        for row in range(2):
            own = values[row::2]
            while len(own) > 1:
                own = [emit.float_add(*own[i : i + 2]) for i in range(0, len(own), 2)]
            result.append(emit.fma(totals[row], shrinks[row], own[0]))
        return result


def _largest(emit: Emitter, values: list[Value]) -> Value:
    return reduce(emit.float_maximum, values)


def _over_keys(emit: Emitter, combine: Callable[[Value, Value], Value], value: Value) -> Value:
    """A value of each key, combined over the lanes that hold a row's keys."""
    for mask in (4, 8, 16):
        value = combine(value, emit.exchange(value, mask))
    return value
