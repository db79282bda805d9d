"""Pure planning: a configuration, a model shape and a device budget become one ``RunPlan``.

The same inputs give the same plan on any machine; ``kvs validate`` prints the very object that ``Session`` runs.
Nothing here reads a clock, a file or the environment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvs_core import arena_sizing, cuda_scratch, plan_memory, policy
from kvs_core.arena_sizing import ArenaNeeds
from kvs_core.attention_arrays import attention_arrays
from kvs_core.cached_layers import KvLayer, attention_layers, attention_of, cached_layers, query_heads, readers_of
from kvs_core.config import DECODE_TOKENS_MAX, DEFAULT_BATCH_TOKENS, DEFAULT_UBATCH_TOKENS, ArenaMode, RunConfig
from kvs_core.cpu.fast_types import FAST_WEIGHT_TYPES
from kvs_core.cpu.step_scratch import step_scratch_bytes
from kvs_core.cuda_scratch import CudaScratch
from kvs_core.cuda_support import CPU_HINT, CUDA_FAST_WEIGHT_TYPES, missing_on_cuda
from kvs_core.device_budget import DeviceBudget, DeviceKind
from kvs_core.errors import PlanError, UnsupportedError
from kvs_core.kv_rotation import HeadRotations, choose_rotations
from kvs_core.kv_types import PageGeometry
from kvs_core.model_shape import LayerCache, LayerShape, ModelShape
from kvs_core.models import model_of
from kvs_core.phase import Phase
from kvs_core.policy import CacheShape, Layout, RingPolicy
from kvs_core.recurrent_state import RecurrentLayer, place_recurrent
from kvs_core.ubatch_choice import choose_ubatch_tokens
from kvs_core.units import MIB, align_up, ceil_div
from kvs_core.window_cache import WindowLayer
from kvs_core.workspace import Workspace

OUTPUT_TILE_ROWS = {Phase.PREFILL: 32, Phase.DECODE: DECODE_TOKENS_MAX}
"""Rows of logits that exist at once; a prompt's outputs are made tile by tile, in bytes the layers no longer need."""


# CPU: small enough that a copied span is still in the cache when attention reads it, and spans so large that starting
# copies and attention costs little. SmolLM2 at depth 4096, f16, a tenth resident, 2 threads (AMD EPYC, 32 MiB of
# level-3 cache), ms a token: spans of 4 MiB in a ring of 8 10.7, 2 in 4 11.2, 1 in 2 12.0, 0.5 in 1 13.4, without an
# arena 8.9. A ring of 16 gains nothing. Half of the room for the ring beats a third and a quarter by 5 and 9 % in an
# arena of 20 MiB, although fewer pages are resident then. Measure again on other cache sizes.
_CPU_RING = RingPolicy(target_bytes=8 * MIB, span_bytes=4 * MIB, room_divisor=2)
_RINGS = {
    DeviceKind.CPU: {phase: _CPU_RING for phase in Phase},
    # CUDA (one H200, PCIe 5): decode at 97.6 % of the link with spans of 32 MiB in a ring of 128, 95.7 % with 16, as a
    # copy first waits for its place in the ring. A micro-batch of a prompt hides the copies behind its arithmetic, but
    # stores and reloads its state at every span: few long ones.
    DeviceKind.CUDA: {
        Phase.PREFILL: RingPolicy(target_bytes=128 * MIB, span_bytes=64 * MIB, room_divisor=4),
        Phase.DECODE: RingPolicy(target_bytes=128 * MIB, span_bytes=32 * MIB, room_divisor=4),
    },
}

_FAST_TYPES = {DeviceKind.CPU: FAST_WEIGHT_TYPES, DeviceKind.CUDA: CUDA_FAST_WEIGHT_TYPES}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingPrediction:
    """Bytes a run must stream: the run's counters have to match them exactly."""

    prompt_bytes: int
    """For a prompt of n_ctx - 1 tokens."""
    decode_step_bytes: int
    """For one token generated with the context full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """Everything a session allocates and every number it is later measured against; sizes in bytes."""

    config: RunConfig
    shape: ModelShape
    budget: DeviceBudget
    n_ctx: int
    n_batch: int
    n_ubatch: int
    kv_layers: tuple[KvLayer, ...]
    window_layers: tuple[WindowLayer, ...]
    recurrent_layers: tuple[RecurrentLayer, ...]
    cache: CacheShape
    prefill: Layout
    decode: Layout
    prefill_workspace: Workspace
    decode_workspace: Workspace
    arena_requested_bytes: int
    """What the user asked for; 0 with the arena off."""
    arena_bytes: int
    """The one device allocation: the request without ``table_bytes``, unless that is more than the KV cache can use."""
    minimum_arena_bytes: int
    useful_arena_bytes: int
    weights_bytes: int
    store_layer_offsets: tuple[int, ...]

    @property
    def chose_ubatch(self) -> bool:
        """``n_ubatch`` is the device's choice; on the CPU it is a default."""
        return self.config.n_ubatch is None and self.budget.kind is DeviceKind.CUDA

    @property
    def streams(self) -> bool:
        """Some page may have to leave the device: there is a host store and a copy engine."""
        return not (self.prefill.is_fully_resident and self.decode.is_fully_resident)

    @property
    def store_bytes(self) -> int:
        return self.cache.total_bytes if self.streams else 0

    @property
    def kv_bytes(self) -> int:
        """KV bytes of the context that have pages; window buffers, which do not grow with it, are not among them."""
        return self.cache.total_bytes

    @property
    def window_bytes(self) -> int:
        """Bytes of all window buffers, part of the arena's state."""
        return sum(layer.n_bytes for layer in self.window_layers)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of what all recurrent layers remember, part of the arena's state."""
        return sum(layer.n_bytes for layer in self.recurrent_layers)

    @property
    def table_bytes(self) -> int:
        """Device memory of the driver's page tables of the host store, taken off the arena that was asked for."""
        return plan_memory.table_bytes(self.budget.kind, self.store_bytes)

    @property
    def device_bytes(self) -> int:
        """Predicted device memory beside driver and kernels: weights, the one allocation, tables of the store."""
        return self.weights_bytes + self.arena_bytes + self.table_bytes

    @property
    def process_bytes(self) -> int:
        """Predicted memory of the process that no file backs, with the context full."""
        results_bytes = 4 * max(OUTPUT_TILE_ROWS.values()) * self.shape.n_vocab
        return plan_memory.process_bytes(self, results_bytes=results_bytes)

    @property
    def host_context_bytes(self) -> int:
        """The part of ``process_bytes`` that a GPU's driver and libraries take."""
        return plan_memory.host_context_bytes(self.budget)

    @property
    def context_bytes(self) -> int:
        """Predicted device memory of driver and kernels."""
        return plan_memory.CONTEXT_BYTES[self.budget.kind]

    @property
    def n_decode_tokens(self) -> int:
        """Tokens of the longest decode step that there is room for."""
        return _decode_tokens(self.n_ubatch)

    def layout(self, phase: Phase) -> Layout:
        return self.prefill if phase is Phase.PREFILL else self.decode

    def workspace(self, phase: Phase) -> Workspace:
        return self.prefill_workspace if phase is Phase.PREFILL else self.decode_workspace

    def store_offset(self, layer: int, page: int) -> int:
        """Where a page lies in the host store: the pages of one layer lie in one run."""
        return self.store_layer_offsets[layer] + page * self.cache.page_bytes[layer]

    def ubatches(self, n_tokens: int) -> tuple[int, ...]:
        return policy.split_ubatches(n_tokens, self.n_batch, self.n_ubatch)

    def streamed_bytes_of_step(self, phase: Phase, n_past: int) -> int:
        return policy.streamed_bytes_of_step(self.layout(phase), n_past)

    def streamed_bytes_of_run(self, n_prompt: int, n_decode_steps: int) -> int:
        """Bytes streamed by a prompt from an empty cache and then single-token steps."""
        return policy.streamed_bytes_of_run(
            self.prefill, self.decode, ubatches=self.ubatches(n_prompt), n_decode_steps=n_decode_steps
        )

    def prediction(self) -> StreamingPrediction:
        return StreamingPrediction(
            prompt_bytes=self.streamed_bytes_of_run(max(0, self.n_ctx - 1), 0),
            decode_step_bytes=self.streamed_bytes_of_step(Phase.DECODE, max(0, self.n_ctx - 1)),
        )

    @property
    def rotates(self) -> bool:
        """Whether rows of plain quantised types are rotated."""
        return self.config.kv_rotate

    def rotations(self) -> Mapping[int, HeadRotations]:
        """By index in the model, the layers whose keys or values are rotated."""
        cached = [(layer.layer_idx, layer.geometry) for layer in self.kv_layers]
        cached += [(layer.layer_idx, layer.geometry) for layer in self.window_layers]
        chosen = {layer_idx: choose_rotations(geometry, plain_types=self.rotates) for layer_idx, geometry in cached}
        return {layer_idx: rotations for layer_idx, rotations in chosen.items() if rotations is not None}

    @property
    def pads_heads(self) -> bool:
        """Whether some layer's heads are longer in the cache than in the model."""
        pairs = attention_layers(self.shape, self.kv_layers, self.window_layers)
        return any(
            (layer.head_dim_k, layer.head_dim_v) != (geometry.head_dim_k, geometry.head_dim_v)
            for layer, geometry in pairs
        )

    def last_readers(self) -> tuple[int, ...]:
        """For each layer with pages, the last layer of the model that attends to them."""
        return tuple(readers[-1] for readers in readers_of(self.shape, self.kv_layers))

    def layers_of_types(self) -> Mapping[str, int]:
        """How many layers cache in each pair of types, as ``K/V``."""
        return Counter(f"{layer.geometry.type_k.value}/{layer.geometry.type_v.value}" for layer in self.kv_layers)

    def kernels(self) -> Mapping[str, str]:
        """The attention kernel of every (K type, V type, head sizes) the run uses."""
        names: dict[str, str] = {}
        for layer, geometry in attention_layers(self.shape, self.kv_layers, self.window_layers):
            types = f"{geometry.type_k.value}/{geometry.type_v.value}"
            pair = f"{types} {layer.head_dim_k}/{layer.head_dim_v}"
            cached = f"{types} {geometry.head_dim_k}/{geometry.head_dim_v}"
            names[pair] = f"{self.budget.kind.value}: paged attention, {cached} read from the page"
            if cached != pair:
                names[pair] += f", heads padded from {layer.head_dim_k}/{layer.head_dim_v}"
            if self.budget.kind is DeviceKind.CUDA:
                names[pair] += f", {self._prefill_kernel(geometry)}"
        return names

    def _prefill_kernel(self, geometry: PageGeometry) -> str:
        if self.budget.compute_capability is None:
            return "the card decides on the prefill kernel"
        return f"prefill kernel: {cuda_scratch.prefill_kernel_name(geometry, self.budget.compute_capability)}"


def plan_run(config: RunConfig, shape: ModelShape, budget: DeviceBudget) -> RunPlan:
    """Plan a run, or raise PlanError with both byte counts when it does not fit.

    With ``config.n_ctx`` None the largest context up to the training length that fits is taken.
    """
    if config.n_ctx:
        return _plan_context(config, shape, budget, config.n_ctx)
    full = shape.n_ctx_train
    if config.n_ctx == 0 or not config.fit:
        return _plan_context(config, shape, budget, full)
    try:
        return _plan_context(config, shape, budget, full)
    except PlanError as error:
        largest = _largest_context(config, shape, budget, full)
        if largest is None:
            raise error
        return largest


def _largest_context(config: RunConfig, shape: ModelShape, budget: DeviceBudget, full: int) -> RunPlan | None:
    """Bisect for the largest whole number of pages that fits; None when not even one does."""
    best: RunPlan | None = None
    low, high = 1, full // config.page_tokens
    while low <= high:
        middle = (low + high) // 2
        try:
            best = _plan_context(config, shape, budget, middle * config.page_tokens)
            low = middle + 1
        except PlanError:
            high = middle - 1
    return best


def _plan_context(config: RunConfig, shape: ModelShape, budget: DeviceBudget, n_ctx: int) -> RunPlan:
    if budget.kind is DeviceKind.CUDA:
        _check_cuda(config, shape)
    n_ubatch = _ubatch_tokens(config, shape, budget, n_ctx)
    kv_layers, window_layers = cached_layers(config, shape, n_ctx, n_ubatch)
    recurrent_layers = place_recurrent(
        [(layer.layer_idx, layer.recurrent) for layer in shape.layers if layer.recurrent is not None],
        begin=sum(layer.n_bytes for layer in window_layers),
    )
    needs = _arena_needs(
        config,
        shape,
        budget,
        n_ctx,
        n_ubatch,
        kv_layers=kv_layers,
        window_layers=window_layers,
        recurrent_layers=recurrent_layers,
    )
    weights_bytes = shape.loaded_bytes(_FAST_TYPES[budget.kind])
    requested = arena_sizing.requested_bytes(config, budget, needs, weights_bytes)
    arena_bytes = arena_sizing.allocation_bytes(needs, requested)
    layouts = arena_sizing.cut_up(needs, arena_bytes)
    plan = RunPlan(
        config=config,
        shape=shape,
        budget=budget,
        n_ctx=n_ctx,
        n_batch=min(config.n_batch or max(DEFAULT_BATCH_TOKENS, n_ubatch), n_ctx),
        n_ubatch=n_ubatch,
        kv_layers=kv_layers,
        window_layers=window_layers,
        recurrent_layers=recurrent_layers,
        cache=needs.cache,
        prefill=layouts[Phase.PREFILL],
        decode=layouts[Phase.DECODE],
        prefill_workspace=needs.workspaces[Phase.PREFILL],
        decode_workspace=needs.workspaces[Phase.DECODE],
        arena_requested_bytes=requested,
        arena_bytes=arena_bytes,
        minimum_arena_bytes=needs.minimum_bytes,
        useful_arena_bytes=align_up(needs.useful_bytes, MIB),
        weights_bytes=weights_bytes,
        store_layer_offsets=_store_offsets(needs.cache),
    )
    plan_memory.check_memory(plan)
    return plan


def _check_cuda(config: RunConfig, shape: ModelShape) -> None:
    """Raise UnsupportedError for what a GPU cannot run, also when it was not asked for by name but found."""
    missing = missing_on_cuda(shape)
    if missing is not None:
        raise UnsupportedError(missing, hint=CPU_HINT)
    for cache in (LayerCache.FULL_KV, LayerCache.LATENT_KV, LayerCache.WINDOW_KV):
        for layer, geometry in attention_of(config, shape, cache):
            cuda_scratch.check_geometry(geometry, layer.n_head, in_window=cache is LayerCache.WINDOW_KV)


def _ubatch_tokens(config: RunConfig, shape: ModelShape, budget: DeviceBudget, n_ctx: int) -> int:
    """What ``-ub`` says, else the device's choice; never more than the context or a batch that was given."""
    n_tokens = config.n_ubatch or DEFAULT_UBATCH_TOKENS
    if config.n_ubatch is None and budget.kind is DeviceKind.CUDA:
        paged = attention_of(config, shape, LayerCache.FULL_KV)
        attention = paged + attention_of(config, shape, LayerCache.WINDOW_KV)
        n_tokens = choose_ubatch_tokens(
            query_heads(paged),
            [layer.experts for layer in shape.layers if layer.experts is not None],
            budget,
            workspace_bytes=lambda n: _plan_workspace(shape, attention, budget, Phase.PREFILL, n, n_pages=0).n_bytes,
        )
    return min(n_tokens, config.n_batch or n_tokens, n_ctx)


def _arena_needs(
    config: RunConfig,
    shape: ModelShape,
    budget: DeviceBudget,
    n_ctx: int,
    n_ubatch: int,
    *,
    kv_layers: tuple[KvLayer, ...],
    window_layers: tuple[WindowLayer, ...],
    recurrent_layers: tuple[RecurrentLayer, ...],
) -> ArenaNeeds:
    cache = CacheShape(
        page_tokens=config.page_tokens,
        page_bytes=tuple(layer.geometry.page_bytes for layer in kv_layers),
        n_pages=ceil_div(n_ctx, config.page_tokens),
        reads=tuple(len(readers) for readers in readers_of(shape, kv_layers)),
    )
    n_tokens = {Phase.PREFILL: n_ubatch, Phase.DECODE: _decode_tokens(n_ubatch)}
    attention = attention_layers(shape, kv_layers, window_layers)
    rings = _RINGS[budget.kind]
    if budget.kind is DeviceKind.CUDA:
        span_step = cuda_scratch.span_step_pages(n_ctx, config.page_tokens, (layer.geometry for layer in kv_layers))
        rings = {phase: replace(ring, span_step=span_step) for phase, ring in rings.items()}
    state_ends = [layer.arena_offset + layer.n_bytes for layer in window_layers]
    state_ends += [layer.arena_offset + layer.n_bytes for layer in recurrent_layers]
    return ArenaNeeds(
        cache=cache,
        state_bytes=max(state_ends, default=0),
        table_bytes=plan_memory.table_bytes(budget.kind, cache.total_bytes),
        n_ubatch=n_ubatch,
        n_tokens=n_tokens,
        workspaces={
            phase: _plan_workspace(shape, attention, budget, phase, n_tokens[phase], cache.n_pages) for phase in Phase
        },
        rings=rings,
    )


def _decode_tokens(n_ubatch: int) -> int:
    """Tokens of the longest decode step; micro-batches shorter than that have shorter ones."""
    return min(DECODE_TOKENS_MAX, n_ubatch)


def _plan_workspace(
    shape: ModelShape,
    attention: list[tuple[LayerShape, PageGeometry]],
    budget: DeviceBudget,
    phase: Phase,
    n_tokens: int,
    n_pages: int,
) -> Workspace:
    model = model_of(shape)
    if budget.kind is DeviceKind.CUDA:
        scratch_bytes = _cuda_scratch(shape, attention, phase, n_tokens, n_pages).n_bytes
    else:
        scratch_bytes = step_scratch_bytes(
            phase,
            matmul_inputs=model.matmul_inputs(shape),
            attention=query_heads(attention),
            n_tokens=n_tokens,
            n_threads=budget.n_threads,
        )
    arrays = attention_arrays(attention, n_tokens)
    workspace: Workspace = model.plan_workspace(shape, n_tokens, OUTPUT_TILE_ROWS[phase], scratch_bytes, arrays)
    return workspace


def _cuda_scratch(
    shape: ModelShape, attention: list[tuple[LayerShape, PageGeometry]], phase: Phase, n_tokens: int, n_pages: int
) -> CudaScratch:
    inputs = model_of(shape).matmul_inputs(shape)
    rows = [2 * layer.n_head * layer.head_dim_k for layer in shape.layers]  # some queries come with gates
    rows += [layer.recurrent.n_channels for layer in shape.layers if layer.recurrent is not None]
    return cuda_scratch.plan_cuda_scratch(
        phase,
        matmul_inputs=inputs,
        expert_inputs=shape.expert_inputs,
        largest_matrix_rows=max(shape.n_vocab, *rows, *inputs),
        attention=query_heads(attention),
        n_tokens=n_tokens,
        n_outputs=OUTPUT_TILE_ROWS[phase],
        n_pages=n_pages,
    )


def cuda_scratch_of(plan: RunPlan, phase: Phase) -> CudaScratch:
    """Where a CUDA step finds its regions within the workspace array ``scratch``."""
    n_tokens = plan.n_ubatch if phase is Phase.PREFILL else plan.n_decode_tokens
    attention = attention_layers(plan.shape, plan.kv_layers, plan.window_layers)
    return _cuda_scratch(plan.shape, attention, phase, n_tokens, plan.cache.n_pages)


def _store_offsets(cache: CacheShape) -> tuple[int, ...]:
    offsets: list[int] = []
    end = 0
    for page_bytes in cache.page_bytes:
        offsets.append(end)
        end += page_bytes * cache.n_pages
    return tuple(offsets)


def with_arena(config: RunConfig, n_bytes: int) -> RunConfig:
    """The same run with another arena: FIXED at ``n_bytes``, or OFF at 0."""
    mode = ArenaMode.FIXED if n_bytes else ArenaMode.OFF
    return replace(config, arena=replace(config.arena, mode=mode, n_bytes=n_bytes))
