"""Which layers of a model see a sliding window only, and the keys that say so."""

from __future__ import annotations

from kvs_core.metadata_reader import MetadataReader

_PATTERN_KEY = "attention.sliding_window_pattern"


def read_window_pattern(
    reader: MetadataReader, n_layer: int, *, period: int, full_first: bool = False
) -> tuple[bool, ...]:
    """Whether each layer has a window: all but the last of every ``period`` layers, unless the file says otherwise.

    ``full_first``: all but the first of them. The key holds another period, or one flag for each layer. A period of 0
    means every layer.
    """
    if not reader.has(_PATTERN_KEY):
        return _every_but_one(n_layer, period, full_first=full_first)
    value = reader.value(_PATTERN_KEY)
    if not isinstance(value, str | int | float | list):
        if value.dtype.kind not in "biu" or len(value) != n_layer:
            raise reader.error(_PATTERN_KEY, f"is no list of {n_layer} flags, one for each layer")
        return tuple(bool(flag) for flag in value)
    return _every_but_one(n_layer, reader.integer(_PATTERN_KEY, low=0), full_first=full_first)


def _every_but_one(n_layer: int, period: int, *, full_first: bool) -> tuple[bool, ...]:
    full = 0 if full_first else period - 1
    return tuple(period == 0 or layer_idx % period != full for layer_idx in range(n_layer))
