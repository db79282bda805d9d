"""Which types single layers cache in: ``--kv-layer-types``. Plain values, no arrays.

    SPEC     ITEM[,ITEM...]    the last item that names a layer counts
    ITEM     WHERE:TYPES
    WHERE    all | firstN | lastN | I | I-J     layers that cache keys and values, counted from 0
    TYPES    TYPE | K/V | K/ | /V               what is left out stays as -ctk and -ctv say

A number alone is one of the llama.cpp fork's layer-adaptive modes, see ``MODES``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvs_core.kv_types import KvType
from kvs_core.model_shape import LayerCache, ModelShape

MODES = {
    "1": "first4:q8_0,last4:q8_0",
    "2": "last8:q8_0",
    "5": "all:/turbo2,first2:/turbo4,last2:/turbo4",
    "6": "all:/turbo2,last8:/turbo4",
    "7": "all:/turbo2,first2:/q8_0,last2:/q8_0",
}
"""The fork's modes, counted over the layers that have keys and values and not over all."""

_CACHES_KV = (LayerCache.FULL_KV, LayerCache.WINDOW_KV, LayerCache.LATENT_KV)
_WHERE = re.compile(
    r"(?P<all>all)|(?P<end>first|last)(?P<count>[1-9]\d{0,4})|(?P<begin>\d{1,5})(-(?P<last>\d{1,5}))?", re.ASCII
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTypes:
    """Types of some layers: of ``begin`` to ``end``, each counted from the last layer where it is negative.

    begin, end        half open; ``end`` None is behind the last layer
    type_k, type_v    None: as for every layer
    """

    begin: int
    end: int | None
    type_k: KvType | None
    type_v: KvType | None

    def __str__(self) -> str:
        """The rule as an ITEM of a SPEC."""
        if self.begin < 0:
            where = f"last{-self.begin}"
        elif self.begin == 0:
            where = "all" if self.end is None else f"first{self.end}"
        else:
            assert self.end is not None, "a SPEC has no item for it"
            where = f"{self.begin}" if self.end == self.begin + 1 else f"{self.begin}-{self.end - 1}"
        type_k, type_v = ("" if kv_type is None else kv_type.value for kv_type in (self.type_k, self.type_v))
        return f"{where}:{type_k}/{type_v}"

    def covers(self, index: int, n_layers: int) -> bool:
        begin = max(0, self.begin + n_layers) if self.begin < 0 else self.begin
        return begin <= index < (n_layers if self.end is None else self.end)


def parse_layer_types(text: str) -> tuple[LayerTypes, ...]:
    """Read a SPEC; raises ValueError with the part that cannot be read."""
    return tuple(_parse_item(item) for item in MODES.get(text, text).split(","))


def _parse_item(item: str) -> LayerTypes:
    where, colon, types = item.partition(":")
    match = _WHERE.fullmatch(where)
    if match is None or not colon:
        raise ValueError(
            f"{item!r} is not WHERE:TYPES, for example first2:q8_0 or 4-7:q8_0/turbo4, nor alone one of the modes "
            f"{', '.join(MODES)}"
        )
    begin, end = 0, None
    if match["end"] == "first":
        end = int(match["count"])
    elif match["end"] == "last":
        begin = -int(match["count"])
    elif match["begin"] is not None:
        begin = int(match["begin"])
        end = int(match["last"] or begin) + 1
        if end <= begin:
            raise ValueError(f"{where!r} names no layer")
    keys, slash, values = types.partition("/")
    type_k, type_v = (_parse_type(part) if part else None for part in (keys, values if slash else keys))
    if type_k is type_v is None:
        raise ValueError(f"{item!r} names no type")
    return LayerTypes(begin=begin, end=end, type_k=type_k, type_v=type_v)


def _parse_type(text: str) -> KvType:
    try:
        return KvType(text)
    except ValueError:
        raise ValueError(f"{text!r} is not one of {', '.join(kv_type.value for kv_type in KvType)}") from None


def count_needed_layers(rule: LayerTypes) -> int:
    """Fewest layers of a model in which everything that the rule names is there."""
    return -rule.begin if rule.begin < 0 else rule.end or 0


def types_by_layer(
    shape: ModelShape, type_k: KvType, type_v: KvType, rules: Sequence[LayerTypes]
) -> dict[int, tuple[KvType, KvType]]:
    """By index in the model, K and V type of each layer that caches keys and values."""
    cached = [layer.layer_idx for layer in shape.layers if layer.cache in _CACHES_KV]
    types = dict.fromkeys(cached, (type_k, type_v))
    for rule in rules:
        for index, layer_idx in enumerate(cached):
            if rule.covers(index, len(cached)):
                old_k, old_v = types[layer_idx]
                types[layer_idx] = (rule.type_k or old_k, rule.type_v or old_v)
    return types
