"""Which layers of a model see a sliding window only, and the keys that say so."""

from __future__ import annotations

from kvs_core.metadata_reader import MetadataReader

_PATTERN_KEY = "attention.sliding_window_pattern"


def read_window_pattern(reader: MetadataReader, n_layer: int, *, period: int) -> tuple[bool, ...]:
    """Whether each layer has a window: all but the last of every ``period`` layers, unless the file says otherwise.

    The key holds another period, or one flag for each layer. A period of 0 means every layer.
    """
    if not reader.has(_PATTERN_KEY):
        return _every_but_last(n_layer, period)
    value = reader.value(_PATTERN_KEY)
    if not isinstance(value, str | int | float | list):
        if value.dtype.kind not in "biu" or len(value) != n_layer:
            raise reader.error(_PATTERN_KEY, f"is no list of {n_layer} flags, one for each layer")
        return tuple(bool(flag) for flag in value)
    return _every_but_last(n_layer, reader.integer(_PATTERN_KEY, low=0))


def _every_but_last(n_layer: int, period: int) -> tuple[bool, ...]:
    return tuple(period == 0 or layer_idx % period < period - 1 for layer_idx in range(n_layer))
