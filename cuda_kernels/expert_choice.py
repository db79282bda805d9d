"""Which experts a token takes, chosen by one warp for kernels that need it before they can begin.

The choice and the weights are those of ``routing.build_route_kernel`` for softmax over all experts with weights that
are divided by their sum; other rules need its launch.
"""

from __future__ import annotations

import math
from typing import Any

from numba import cuda
from numba.cuda import float32, float64, int32, int64, types

from cuda_kernels.emit import Emitter, Value, emitted, words
from cuda_kernels.intrinsics import FULL_WARP
from cuda_kernels.launch import device_function
from cuda_kernels.routing import LOWEST
from kvs_core.units import ceil_div

_TAKEN = -(2**31)
"""The key of an expert that is taken already, or does not exist."""


class ExpertChoice:
    """Device functions that one warp calls together, for numbers of experts that are known.

    choose(logits, lane)                     expert ``i`` of a token in lane i; ``logits``: address of the token's own
    weigh(logits, expert, lane, scale)       weight of the expert in lane i
    """

    def __init__(self, n_expert: int, n_used: int) -> None:
        self.n_expert, self.n_used = n_expert, n_used
        self.n_own = ceil_div(n_expert, 32)
        read = emitted(words(self.n_own), types.int64, types.int32)(self._read)
        take = emitted(types.int32, words(self.n_own), types.int32)(self._take)

        @device_function
        def choose(logits, lane):
            return take(read(logits, lane), lane)

        self.choose = choose
        self.weigh = _build_weigh(n_used)

    def _read(self, emit: Emitter, logits: Value, lane: Value) -> list[Value]:
        """Logits of every 32nd expert as signed words in the same order; NaN and minus infinity are the lowest."""
        keys = []
        for i in range(self.n_own):
            expert = emit.add(lane, 32 * i)
            is_there = emit.less(expert, emit.word(self.n_expert))
            place = emit.select(is_there, expert, emit.word(0))
            logit = emit.as_float(emit.load_early(emit.add(logits, emit.widen(emit.shift_left(place, 2))), 0))
            # the sum makes a positive zero of a negative one
            score = emit.float_add(emit.float_maximum(logit, emit.float(LOWEST)), emit.float(0.0))
            bits = emit.as_word(score)
            ordered = emit.bit_xor(bits, emit.bit_and(emit.shift_right_signed(bits, 31), 0x7FFFFFFF))
            keys.append(emit.select(is_there, ordered, emit.word(_TAKEN)))
        return keys

    def _take(self, emit: Emitter, keys: list[Value], lane: Value) -> Value:
        """The largest key first, the lower expert among equals."""
        chosen, keys = emit.word(0), list(keys)
        for slot in range(self.n_used):
            largest = keys[0]
            for key in keys[1:]:
                largest = emit.maximum(largest, key)
            largest = emit.warp_maximum(largest)
            first = emit.word(self.n_expert)
            for i, key in reversed(list(enumerate(keys))):
                first = emit.select(emit.equal(key, largest), emit.add(lane, 32 * i), first)
            first = emit.warp_minimum(first)
            chosen = emit.select(emit.equal(lane, emit.word(slot)), first, chosen)
            keys = [
                emit.select(emit.equal(emit.add(lane, 32 * i), first), emit.word(_TAKEN), key)
                for i, key in enumerate(keys)
            ]
        return chosen


@emitted(types.float32, types.int64)
def load_early_float(emit: Emitter, address: Value) -> Value:
    """A float32 that a kernel which has ended wrote, read before this one has waited."""
    return emit.as_float(emit.load_early(address, 0))


def _build_weigh(n_used: int) -> Any:
    @device_function
    def weigh(logits, expert, lane, scale):
        logit = load_early_float(logits + int64(expert) * 4)
        highest = max(cuda.shfl_sync(FULL_WARP, logit, 0), float32(LOWEST))
        likely = math.exp(float64(logit) - float64(highest))
        taken = float64(0.0)
        for slot in range(n_used):
            taken += cuda.shfl_sync(FULL_WARP, likely, int32(slot))
        return float32(likely / taken * float64(scale))

    return weigh
