"""How large the arena is and how both phases cut it up. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvs_core import plan_memory, policy
from kvs_core.config import ArenaMode, RunConfig
from kvs_core.device_budget import DeviceBudget
from kvs_core.errors import PlanError
from kvs_core.phase import Phase
from kvs_core.policy import CacheShape, Layout, RingPolicy
from kvs_core.units import MIB, align_up, show_size
from kvs_core.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaNeeds:
    """What has to find room, before the arena is cut up; sizes in bytes."""

    cache: CacheShape
    state_bytes: int
    """Window buffers and recurrent state, the same in both phases."""
    table_bytes: int
    """Device memory that the driver takes for its page tables of the host store, if there is one."""
    n_ubatch: int
    n_tokens: Mapping[Phase, int]
    """Tokens of the longest step."""
    workspaces: Mapping[Phase, Workspace]
    rings: Mapping[Phase, RingPolicy]

    def smallest_streaming_bytes(self, phase: Phase) -> int:
        """The allocation that a phase needs at least when it streams."""
        return policy.fixed_bytes(
            self.cache,
            state_bytes=self.state_bytes,
            workspace_bytes=self.workspaces[phase].n_bytes,
            n_tokens=self.n_tokens[phase],
            span_step=self.rings[phase].span_step,
        )

    def resident_bytes(self, phase: Phase, tail_bytes: int = 0) -> int:
        """The allocation that holds the whole cache in a phase."""
        return policy.fully_resident_bytes(
            self.cache,
            state_bytes=self.state_bytes,
            workspace_bytes=self.workspaces[phase].n_bytes,
            tail_bytes=tail_bytes,
        )

    @property
    def useful_bytes(self) -> int:
        """The arena beyond which nothing more can become resident: there is no host store, so no tables of it."""
        return max(self.resident_bytes(phase) for phase in Phase)

    @property
    def minimum_bytes(self) -> int:
        """The smallest arena to ask for, whole MiB."""
        streaming = max(self.smallest_streaming_bytes(phase) for phase in Phase)
        return align_up(min(streaming + self.table_bytes, self.useful_bytes), MIB)


def requested_bytes(config: RunConfig, budget: DeviceBudget, needs: ArenaNeeds, weights_bytes: int) -> int:
    """The arena asked for; AUTO takes what is free beside the weights, up to the useful size; 0 with the arena off.

    Raises PlanError for one that cannot work.
    """
    if config.arena.mode is ArenaMode.OFF:
        return 0
    if config.arena.mode is ArenaMode.FIXED:
        if config.arena.n_bytes < needs.minimum_bytes:
            raise _too_small(config, needs)
        return config.arena.n_bytes
    useful = align_up(needs.useful_bytes, MIB)
    free = budget.free_bytes - weights_bytes - plan_memory.margin_bytes(budget.kind)
    if not budget.shares_host_memory and free >= useful:
        return useful
    if budget.shares_host_memory and config.store_path is None:
        free -= needs.cache.total_bytes
    chosen = min(free // MIB * MIB, useful)
    if chosen < needs.minimum_bytes:
        taken = show_size(budget.free_bytes - free)
        raise PlanError(
            f"arena auto: it needs at least {_mib(needs.minimum_bytes)} MiB beside the {taken} for weights, host store "
            f"and margin; {show_size(budget.free_bytes)} are free",
            required_bytes=budget.free_bytes - free + needs.minimum_bytes,
            available_bytes=budget.free_bytes,
            hint="lower the micro-batch (-ub) or the context (-c), or use a model file with smaller weights",
        )
    return chosen


def allocation_bytes(needs: ArenaNeeds, requested: int) -> int:
    """The one device allocation for an arena of ``requested`` bytes; 0, the arena off, holds everything.

    An arena bounds all device memory that grows with the context. The driver's page tables of a locked host store do,
    so they are taken off it; an arena that holds the whole cache has no store.
    """
    if not requested:
        return needs.useful_bytes
    if requested >= needs.useful_bytes:
        return min(requested, align_up(needs.useful_bytes, MIB))
    return requested - needs.table_bytes


def cut_up(needs: ArenaNeeds, arena_bytes: int) -> dict[Phase, Layout]:
    """Both phases of an allocation: without streaming when everything fits, else each as resident as it can be."""
    if arena_bytes >= needs.useful_bytes:
        return {phase: _resident_layout(needs, phase, arena_bytes, tail_bytes=0) for phase in Phase}
    layouts: dict[Phase, Layout] = {}
    tail_bytes = needs.cache.row_bytes
    for phase in Phase:
        if arena_bytes >= needs.resident_bytes(phase, tail_bytes):
            layouts[phase] = _resident_layout(needs, phase, arena_bytes, tail_bytes=tail_bytes)
        else:
            layouts[phase] = policy.plan_streaming(
                phase,
                needs.cache,
                needs.rings[phase],
                arena_bytes=arena_bytes,
                state_bytes=needs.state_bytes,
                workspace_bytes=needs.workspaces[phase].n_bytes,
                n_tokens=needs.n_tokens[phase],
            )
    return layouts


def _resident_layout(needs: ArenaNeeds, phase: Phase, arena_bytes: int, *, tail_bytes: int) -> Layout:
    return policy.plan_fully_resident(
        phase,
        needs.cache,
        arena_bytes=arena_bytes,
        state_bytes=needs.state_bytes,
        workspace_bytes=needs.workspaces[phase].n_bytes,
        tail_bytes=tail_bytes,
    )


def _too_small(config: RunConfig, needs: ArenaNeeds) -> PlanError:
    phase = max(Phase, key=needs.smallest_streaming_bytes)
    minimum = needs.minimum_bytes
    return PlanError(
        f"arena {_mib(config.arena.n_bytes)} MiB is too small for {phase.value} with -ub {needs.n_ubatch}: "
        f"needs {_mib(minimum)} MiB",
        required_bytes=minimum,
        available_bytes=config.arena.n_bytes,
        hint=f"use --kv-stream-arena-mib {_mib(minimum)} or more, or lower -ub",
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:.0f}" if n_bytes % MIB == 0 else f"{n_bytes / MIB:.1f}"
