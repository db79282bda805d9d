"""The recurrent half of a hybrid model's layer: its sizes, which layers have one, and the keys that say so."""

from __future__ import annotations

from dataclasses import dataclass

from kvs_core.metadata_reader import MetadataReader

HEAD_DIM_STEP = 16
"""Head sizes are multiples of this: kernels work on vectors of as many lanes."""

_RECURRENT_KEY = "attention.recurrent_layers"
_DEFAULT_INTERVAL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """A gated delta net behind a short convolution.

    n_head_k         heads of queries and of keys
    n_head_v         heads of values, a multiple of ``n_head_k``; each has a matrix [head_dim, head_dim] as its state
    head_dim         size of every head
    n_taps           inputs of a channel that the convolution sees, the token's own included
    groups_values    value head h works with key head h // (n_head_v / n_head_k); otherwise with h mod n_head_k
    """

    n_head_k: int
    n_head_v: int
    head_dim: int
    n_taps: int
    groups_values: bool

    @property
    def n_head(self) -> int:
        """Heads that go through the convolution: of queries, of keys, of values, in this order."""
        return 2 * self.n_head_k + self.n_head_v

    @property
    def n_inner(self) -> int:
        """Elements of all value heads."""
        return self.n_head_v * self.head_dim

    @property
    def n_channels(self) -> int:
        """Channels of the convolution."""
        return self.n_head * self.head_dim

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The inputs that the next token's convolution sees, oldest first."""
        return self.n_taps - 1, self.n_channels

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """For each value head a matrix of keys by values, cut into groups of ``HEAD_DIM_STEP`` of its columns.

        Row i of a group holds what key element i brings to those value elements.
        """
        return self.n_head_v, self.head_dim // HEAD_DIM_STEP, self.head_dim, HEAD_DIM_STEP


def read_recurrent(reader: MetadataReader, *, groups_values: bool) -> RecurrentShape:
    """The ``ssm.*`` keys, which every recurrent layer of a model shares."""
    n_head_k = reader.integer("ssm.group_count")
    n_head_v = reader.integer("ssm.time_step_rank")
    head_dim = reader.integer("ssm.state_size")
    n_inner = reader.integer("ssm.inner_size")
    if n_head_v % n_head_k:
        raise reader.error(
            "ssm.time_step_rank", f"is {n_head_v}; a multiple of {reader.full_key('ssm.group_count')} {n_head_k} needed"
        )
    if n_inner != n_head_v * head_dim:
        raise reader.error("ssm.inner_size", f"is {n_inner}; {n_head_v} heads of {head_dim} elements needed")
    if head_dim % HEAD_DIM_STEP:
        raise reader.unsupported("ssm.state_size", str(head_dim), f"is no multiple of {HEAD_DIM_STEP}")
    return RecurrentShape(
        n_head_k=n_head_k,
        n_head_v=n_head_v,
        head_dim=head_dim,
        n_taps=reader.integer("ssm.conv_kernel", low=2),
        groups_values=groups_values,
    )


def read_recurrent_pattern(reader: MetadataReader, n_layer: int, n_trunk: int) -> tuple[bool, ...]:
    """Whether each of the first ``n_trunk`` of ``n_layer`` layers is recurrent.

    One flag for each layer, or all but the last of every ``full_attention_interval`` layers. Raises ModelFileError when
    no layer attends.
    """
    if reader.has(_RECURRENT_KEY):
        value = reader.value(_RECURRENT_KEY)
        if isinstance(value, str | int | float | list) or value.dtype.kind not in "biu" or len(value) != n_layer:
            raise reader.error(_RECURRENT_KEY, f"is no list of {n_layer} flags, one for each layer")
        pattern = tuple(bool(flag) for flag in value)[:n_trunk]
    else:
        interval = reader.integer("full_attention_interval", _DEFAULT_INTERVAL)
        pattern = tuple((layer_idx + 1) % interval != 0 for layer_idx in range(n_trunk))
    if all(pattern):
        raise reader.error("block_count", f"is {n_layer}, and none of the layers attends; one at least needed")
    return pattern
