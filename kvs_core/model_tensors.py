"""Which tensors each architecture needs, and the check that a file has exactly those, in usable shapes and types.
Sizes come from model_shape.py, the file's side from model_file.py; no bytes are read here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvs_core.cpu.scratch import MIN_MATMUL_INPUTS
from kvs_core.errors import ModelFileError, Problem, UnsupportedModelError
from kvs_core.messages import show_text

if TYPE_CHECKING:
    from kvs_core.gguf_header import TensorInfo
    from kvs_core.model_shape import LayerShape, RopeShape
    from kvs_core.recurrent_shape import RecurrentShape

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
CONVOLUTION = "ssm_conv1d"

# fmt: off
WEIGHT_TYPES = frozenset({
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ4_NL", "IQ4_XS",
})
# fmt: on
"""Types that weights can be read from: those the ``gguf`` package can dequantise (a test compares the two)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor an architecture uses; ``shape`` in GGML order, the contiguous axis first.

    unless   a required tensor may be missing when the file has this one in its place
    or_rows  it may have this many rows instead
    """

    name: str
    shape: tuple[int, ...]
    is_required: bool = True
    unless: str | None = None
    or_rows: int | None = None


def llama_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``llama`` and ``mistral3``, global ones first, then layer by layer; any matrix may have a bias."""
    yield from _global_tensors(n_embd, n_vocab)
    yield TensorSpec(name=ROPE_FACTORS, shape=(rope.n_rot // 2,), is_required=False)
    for layer in layers:
        yield from _attention_tensors(n_embd, layer, may_have_bias=("attn_q", "attn_k", "attn_v", "attn_output"))
        if layer.experts is None:
            yield from _feed_forward_tensors(n_embd, layer, may_have_bias=True)
        else:
            yield from _expert_tensors(n_embd, layer)


def qwen2_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``qwen2``: queries, keys and values have a bias."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        yield from _attention_tensors(n_embd, layer, may_have_bias=("attn_q", "attn_k", "attn_v"))
        yield from _feed_forward_tensors(n_embd, layer)


def qwen2moe_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``qwen2moe``: the attention of ``qwen2``, experts, a shared expert and its gate."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        yield from _attention_tensors(n_embd, layer, may_have_bias=("attn_q", "attn_k", "attn_v"))
        yield from _expert_tensors(n_embd, layer)
        yield from _feed_forward_tensors(n_embd, layer, suffix="_shexp")
        yield TensorSpec(name=f"blk.{layer.layer_idx}.ffn_gate_inp_shexp.weight", shape=(n_embd,))


def qwen3_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``qwen3`` and ``qwen3moe``: every query and key head is normalised."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        yield from _attention_tensors(n_embd, layer)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorSpec(name=f"blk.{layer.layer_idx}.{name}.weight", shape=(layer.head_dim_k,))
        if layer.experts is None:
            yield from _feed_forward_tensors(n_embd, layer)
        else:
            yield from _expert_tensors(n_embd, layer)


def deepseek2_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``deepseek2``: latent attention, split for every head; experts with a shared one, perhaps a bias."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        yield from _latent_tensors(n_embd, layer)
        if layer.experts is None:
            yield from _feed_forward_tensors(n_embd, layer)
            continue
        yield from _expert_tensors(n_embd, layer)
        yield from _feed_forward_tensors(n_embd, layer, suffix="_shexp")
        yield TensorSpec(name=f"{block}.exp_probs_b.bias", shape=(layer.experts.n_expert,), is_required=False)


def _latent_tensors(n_embd: int, layer: LayerShape) -> Iterator[TensorSpec]:
    """The norms of a block and the matrices of latent attention; queries come straight or through a latent."""
    latent, n_head = layer.latent, layer.n_head
    if latent is None:
        return
    block = f"blk.{layer.layer_idx}"
    for name, n in (("attn_norm", n_embd), ("ffn_norm", n_embd), ("attn_kv_a_norm", latent.kv_rank)):
        yield TensorSpec(name=f"{block}.{name}.weight", shape=(n,))
    if latent.q_rank:
        yield TensorSpec(name=f"{block}.attn_q_a.weight", shape=(n_embd, latent.q_rank))
        yield TensorSpec(name=f"{block}.attn_q_a_norm.weight", shape=(latent.q_rank,))
        yield TensorSpec(name=f"{block}.attn_q_b.weight", shape=(latent.q_rank, n_head * latent.key_dim))
    else:
        yield TensorSpec(name=f"{block}.attn_q.weight", shape=(n_embd, n_head * latent.key_dim))
    yield TensorSpec(name=f"{block}.attn_kv_a_mqa.weight", shape=(n_embd, latent.kv_rank + latent.n_rot))
    yield TensorSpec(name=f"{block}.attn_k_b.weight", shape=(latent.n_plain, latent.kv_rank, n_head))
    yield TensorSpec(name=f"{block}.attn_v_b.weight", shape=(latent.kv_rank, latent.value_dim, n_head))
    yield TensorSpec(name=f"{block}.attn_output.weight", shape=(n_head * latent.value_dim, n_embd))


def gemma2_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``gemma2``: a norm after attention and after the feed-forward; the output is the embedding."""
    for spec in _global_tensors(n_embd, n_vocab):
        if spec.name != OUTPUT:
            yield spec
    for layer in layers:
        yield from _gemma_layer_tensors(n_embd, layer)


def gemma3_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``gemma3``: those of ``gemma2``, a norm of every query and key head, perhaps an output matrix."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        yield from _gemma_layer_tensors(n_embd, layer)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorSpec(name=f"blk.{layer.layer_idx}.{name}.weight", shape=(layer.head_dim_k,))


def gemma4_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``gemma4``: those of ``gemma3``, factors of the pairs, a scale of the layer, perhaps experts.

    A layer that attends to another's cache may have matrices for keys and values all the same; they are not used.
    """
    yield from _global_tensors(n_embd, n_vocab)
    layers = tuple(layers)
    yield from _own_embedding_tensors(n_embd, n_vocab, layers)
    if any(not layer.n_swa for layer in layers):
        yield TensorSpec(name=ROPE_FACTORS, shape=(rope.n_rot // 2,))
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        for spec in _gemma_layer_tensors(n_embd, layer):
            may_lack = spec.name == f"{block}.attn_v.weight" or (
                layer.kv_from is not None and spec.name == f"{block}.attn_k.weight"
            )
            yield replace(spec, is_required=spec.is_required and not may_lack)
        yield TensorSpec(name=f"{block}.attn_q_norm.weight", shape=(layer.head_dim_k,))
        yield TensorSpec(
            name=f"{block}.attn_k_norm.weight", shape=(layer.head_dim_k,), is_required=layer.kv_from is None
        )
        yield TensorSpec(name=f"{block}.layer_output_scale.weight", shape=(1,), is_required=False)
        yield from _gemma4_expert_tensors(n_embd, layer)


def _own_embedding_tensors(n_embd: int, n_vocab: int, layers: tuple[LayerShape, ...]) -> Iterator[TensorSpec]:
    """Embeddings of every layer, side by side, and what each layer makes of its own."""
    n_own = layers[0].n_own_embd
    if not n_own:
        return
    n_all = n_own * len(layers)
    yield TensorSpec(name="per_layer_token_embd.weight", shape=(n_all, n_vocab))
    yield TensorSpec(name="per_layer_model_proj.weight", shape=(n_embd, n_all))
    yield TensorSpec(name="per_layer_proj_norm.weight", shape=(n_own,))
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        yield TensorSpec(name=f"{block}.inp_gate.weight", shape=(n_embd, n_own))
        yield TensorSpec(name=f"{block}.proj.weight", shape=(n_own, n_embd))
        yield TensorSpec(name=f"{block}.post_norm.weight", shape=(n_embd,))


def _gemma4_expert_tensors(n_embd: int, layer: LayerShape) -> Iterator[TensorSpec]:
    """Router, experts with gate and up apart or in one, and the norms around them."""
    experts = layer.experts
    if experts is None:
        return
    block = f"blk.{layer.layer_idx}"
    both = TensorSpec(
        name=f"{block}.ffn_gate_up_exps.weight", shape=(n_embd, 2 * experts.n_ff, experts.n_expert), is_required=False
    )
    yield both
    halves = (f"{block}.ffn_gate_exps.weight", f"{block}.ffn_up_exps.weight")
    for spec in _expert_tensors(n_embd, layer):
        yield replace(spec, unless=both.name) if spec.name in halves else spec
    yield TensorSpec(name=f"{block}.ffn_down_exps.scale", shape=(experts.n_expert,), is_required=False)
    yield TensorSpec(name=f"{block}.ffn_gate_inp.scale", shape=(n_embd,))
    for name in ("post_ffw_norm_1", "pre_ffw_norm_2", "post_ffw_norm_2"):
        yield TensorSpec(name=f"{block}.{name}.weight", shape=(n_embd,))


def gpt_oss_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``gpt-oss``: sinks, experts, many biases; the norm before the experts has another name."""
    for spec in _global_tensors(n_embd, n_vocab):
        yield replace(spec, is_required=True)
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        for spec in _attention_tensors(n_embd, layer, may_have_bias=("attn_q", "attn_k", "attn_v", "attn_output")):
            is_norm = spec.name == f"{block}.ffn_norm.weight"
            yield replace(spec, name=f"{block}.post_attention_norm.weight") if is_norm else spec
        yield TensorSpec(name=f"{block}.attn_sinks.weight", shape=(layer.n_head,))
        for spec in _expert_tensors(n_embd, layer):
            yield spec
            yield TensorSpec(name=spec.name.removesuffix(".weight") + ".bias", shape=spec.shape[1:])


def laguna_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``laguna``: norms of heads, a gate for each head or element, experts with a bias, a shared one."""
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        yield from _attention_tensors(n_embd, layer)
        for name in ("attn_q_norm", "attn_k_norm"):
            yield TensorSpec(name=f"{block}.{name}.weight", shape=(layer.head_dim_k,))
        n_elements = layer.n_head * layer.head_dim_v
        yield TensorSpec(name=f"{block}.attn_gate.weight", shape=(n_embd, layer.n_head), or_rows=n_elements)
        if layer.experts is None:
            yield from _feed_forward_tensors(n_embd, layer)
        else:
            yield from _expert_tensors(n_embd, layer)
            yield from _feed_forward_tensors(n_embd, layer, suffix="_shexp")
            yield TensorSpec(name=f"{block}.exp_probs_b.bias", shape=(layer.experts.n_expert,))


def qwen35_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``qwen35`` and ``qwen35moe``: two matrices for the gates of a recurrent layer."""
    yield from _hybrid_tensors(n_embd, n_vocab, layers, gates=(("ssm_beta", 1), ("ssm_alpha", 1)))


def qwen3next_tensors(n_embd: int, n_vocab: int, rope: RopeShape, layers: Iterable[LayerShape]) -> Iterator[TensorSpec]:
    """Tensors of ``qwen3next``: both gates of a recurrent layer in one matrix."""
    yield from _hybrid_tensors(n_embd, n_vocab, layers, gates=(("ssm_ba", 2),))


def _hybrid_tensors(
    n_embd: int, n_vocab: int, layers: Iterable[LayerShape], *, gates: tuple[tuple[str, int], ...]
) -> Iterator[TensorSpec]:
    """Recurrent layers, attention with an output gate in the matrix of the queries, dense or with a shared expert.

    gates   matrices of a recurrent layer's gates, and how many numbers a value head they give
    """
    yield from _global_tensors(n_embd, n_vocab)
    for layer in layers:
        block = f"blk.{layer.layer_idx}"
        yield TensorSpec(name=f"{block}.post_attention_norm.weight", shape=(n_embd,))
        if layer.recurrent is None:
            for spec in _attention_tensors(n_embd, layer):
                if spec.name == f"{block}.attn_q.weight":
                    yield replace(spec, shape=(n_embd, 2 * spec.shape[1]))
                elif spec.name != f"{block}.ffn_norm.weight":
                    yield spec
            for name in ("attn_q_norm", "attn_k_norm"):
                yield TensorSpec(name=f"{block}.{name}.weight", shape=(layer.head_dim_k,))
        else:
            yield from _recurrent_tensors(n_embd, block, layer.recurrent, gates)
        if layer.experts is None:
            yield from _feed_forward_tensors(n_embd, layer)
        else:
            yield from _expert_tensors(n_embd, layer)
            yield from _feed_forward_tensors(n_embd, layer, suffix="_shexp")
            yield TensorSpec(name=f"{block}.ffn_gate_inp_shexp.weight", shape=(n_embd,))


def _recurrent_tensors(
    n_embd: int, block: str, recurrent: RecurrentShape, gates: tuple[tuple[str, int], ...]
) -> Iterator[TensorSpec]:
    """A gated delta net behind a short convolution; a file with both projections in one matrix is refused for that."""
    n_head = recurrent.n_head_v
    both = f"{block}.ssm_in.weight"
    yield TensorSpec(name=f"{block}.attn_norm.weight", shape=(n_embd,))
    yield TensorSpec(name=f"{block}.attn_qkv.weight", shape=(n_embd, recurrent.n_channels), unless=both)
    yield TensorSpec(name=f"{block}.attn_gate.weight", shape=(n_embd, recurrent.n_inner), unless=both)
    for name, n_each in gates:
        yield TensorSpec(name=f"{block}.{name}.weight", shape=(n_embd, n_each * n_head))
    yield TensorSpec(name=f"{block}.{CONVOLUTION}.weight", shape=(recurrent.n_taps, recurrent.n_channels))
    yield TensorSpec(name=f"{block}.ssm_dt.bias", shape=(n_head,))
    yield TensorSpec(name=f"{block}.ssm_a", shape=(n_head,))
    yield TensorSpec(name=f"{block}.ssm_norm.weight", shape=(recurrent.head_dim,))
    yield TensorSpec(name=f"{block}.ssm_out.weight", shape=(recurrent.n_inner, n_embd))


def _gemma_layer_tensors(n_embd: int, layer: LayerShape) -> Iterator[TensorSpec]:
    yield from _attention_tensors(n_embd, layer, may_have_bias=("attn_q", "attn_k", "attn_v"))
    yield from _feed_forward_tensors(n_embd, layer)
    for name in ("post_attention_norm", "post_ffw_norm"):
        yield TensorSpec(name=f"blk.{layer.layer_idx}.{name}.weight", shape=(n_embd,))


def _global_tensors(n_embd: int, n_vocab: int) -> Iterator[TensorSpec]:
    yield TensorSpec(name=TOKEN_EMBEDDING, shape=(n_embd, n_vocab))
    yield TensorSpec(name="output_norm.weight", shape=(n_embd,))
    yield TensorSpec(name=OUTPUT, shape=(n_embd, n_vocab), is_required=False)


def _attention_tensors(
    n_embd: int, layer: LayerShape, may_have_bias: Container[str] = frozenset()
) -> Iterator[TensorSpec]:
    """The norms of a block and the four matrices of its attention."""
    block = f"blk.{layer.layer_idx}"
    yield TensorSpec(name=f"{block}.attn_norm.weight", shape=(n_embd,))
    yield TensorSpec(name=f"{block}.ffn_norm.weight", shape=(n_embd,))
    for name, n_in, n_rows in (
        ("attn_q", n_embd, layer.n_head * layer.head_dim_k),
        ("attn_k", n_embd, layer.n_head_kv * layer.head_dim_k),
        ("attn_v", n_embd, layer.n_head_kv * layer.head_dim_v),
        ("attn_output", layer.n_head * layer.head_dim_v, n_embd),
    ):
        yield TensorSpec(name=f"{block}.{name}.weight", shape=(n_in, n_rows))
        if name in may_have_bias:
            yield TensorSpec(name=f"{block}.{name}.bias", shape=(n_rows,), is_required=False)


def _feed_forward_tensors(
    n_embd: int, layer: LayerShape, *, suffix: str = "", may_have_bias: bool = False
) -> Iterator[TensorSpec]:
    """A gated feed-forward that every token takes."""
    for name, n_in, n_rows in (
        ("ffn_gate", n_embd, layer.n_ff),
        ("ffn_up", n_embd, layer.n_ff),
        ("ffn_down", layer.n_ff, n_embd),
    ):
        yield TensorSpec(name=f"blk.{layer.layer_idx}.{name}{suffix}.weight", shape=(n_in, n_rows))
        if may_have_bias:
            yield TensorSpec(name=f"blk.{layer.layer_idx}.{name}{suffix}.bias", shape=(n_rows,), is_required=False)


def _expert_tensors(n_embd: int, layer: LayerShape) -> Iterator[TensorSpec]:
    """A router and the experts it chooses from, each kind of matrix in one tensor, expert after expert."""
    experts = layer.experts
    if experts is None:
        return
    block = f"blk.{layer.layer_idx}"
    yield TensorSpec(name=f"{block}.ffn_gate_inp.weight", shape=(n_embd, experts.n_expert))
    for name, n_in, n_rows in (
        ("ffn_gate_exps", n_embd, experts.n_ff),
        ("ffn_up_exps", n_embd, experts.n_ff),
        ("ffn_down_exps", experts.n_ff, n_embd),
    ):
        yield TensorSpec(name=f"{block}.{name}.weight", shape=(n_in, n_rows, experts.n_expert))


def check_tensors(
    specs: Iterable[TensorSpec], tensors: Mapping[str, TensorInfo], *, path: str, architecture: str
) -> None:
    """Every required tensor is there, every tensor has the shape of its spec and a readable type, none is left over.

    A left-over tensor would change the result if the model's own code used it, so it is refused, not ignored.
    Raises ModelFileError, or UnsupportedModelError for a tensor that the architecture's forward pass does not know or
    whose rows are too short for it.
    """
    shown = show_text(path)
    used = set()
    for spec in specs:
        tensor = tensors.get(spec.name)
        if tensor is None:
            if spec.is_required and spec.unless not in tensors:
                raise ModelFileError(
                    f"{shown}: tensor {spec.name} is missing; architecture {architecture} needs it, "
                    f"{_show_shape(spec.shape)}",
                    path=path,
                    key=spec.name,
                    hint="the file holds only part of a model; use another conversion of it",
                )
            continue
        used.add(spec.name)
        if _trim(tensor.shape) not in _allowed_shapes(spec):
            raise ModelFileError(
                f"{shown}: tensor {spec.name} is {_show_shape(tensor.shape)}; "
                f"{_show_shape(spec.shape)} needed by the {architecture}.* keys",
                path=path,
                key=spec.name,
                hint="keys and tensors of the file disagree; use another conversion of the model",
            )
        if tensor.type.name not in WEIGHT_TYPES:
            raise ModelFileError(
                f"{shown}: tensor {spec.name} has type {tensor.type.name} ({int(tensor.type)}), "
                f"which is no type of weights; readable: {', '.join(sorted(WEIGHT_TYPES))}",
                path=path,
                key=spec.name,
                hint="use a file quantised to one of these types",
            )
        if _is_product(spec) and spec.shape[0] < MIN_MATMUL_INPUTS:
            raise _refused_tensor(
                spec.name,
                f"has rows of {spec.shape[0]} weights; products need {MIN_MATMUL_INPUTS} or more ({shown})",
                hint="use a larger model",
            )
    for name in tensors:
        if name not in used:
            raise _refused_tensor(
                name,
                f"architecture {architecture} does not use it in a model of these sizes ({shown})",
                hint="the model needs code that kvs does not have yet; use another conversion or another model",
            )


def _is_product(spec: TensorSpec) -> bool:
    """Whether activations are multiplied with its rows."""
    return len(spec.shape) > 1 and CONVOLUTION not in spec.name


def _refused_tensor(name: str, reason: str, *, hint: str) -> UnsupportedModelError:
    problem = Problem(field="tensor", value=show_text(name), reason=reason, hint=hint)
    return UnsupportedModelError([problem], hint=hint)


def _allowed_shapes(spec: TensorSpec) -> set[tuple[int, ...]]:
    other = spec.shape if spec.or_rows is None else (spec.shape[0], spec.or_rows)
    return {_trim(spec.shape), _trim(other)}


def _trim(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without trailing ones: GGML sees no difference between ``{n}`` and ``{n, 1}``."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _show_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(str(dim) for dim in shape)
