"""Products of several vectors with Q2_K and Q3_K by integer tensor cores: the bits of ``matvec`` in less time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf import GGMLQuantizationType
from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.activation import Activation, build_gated_end
from cuda_kernels.emit import Emitter, Value, emitted
from cuda_kernels.intrinsics import (
    FULL_WARP,
    add,
    commit_copies,
    load_float,
    load_float_past_l1,
    shared_address,
    store_float,
    wait_all_copies,
)
from cuda_kernels.launch import (
    SHARED_LIMIT,
    SHARED_LIMIT_90,
    Kernel,
    device_function,
    device_multiprocessors,
    kernel_builder,
)
from cuda_kernels.matvec_stream import can_stream
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.row_units import SIGNATURE
from cuda_kernels.team_tiles import STAGE_BYTES, TEAM_TYPES, TEAM_WARPS, TILE_ROWS, TeamTile
from cuda_kernels.vector_input import load_shared_float
from cuda_kernels.warpgroup import warp_uniform
from kvs_core.units import ceil_div

TEAM_THREADS = 32 * TEAM_WARPS
_MOST_TEAMS = {GGMLQuantizationType.Q2_K: 4, GGMLQuantizationType.Q3_K: 3}
"""Of a block, one of which takes a multiprocessor; more do not find registers."""
_LEAST_VECTORS = {GGMLQuantizationType.Q2_K: 3, GGMLQuantizationType.Q3_K: 5}
"""With fewer, lanes take less time."""
N_STAGES = 3
"""Blocks of 256 weights of its rows that a warp has room for, one of which it works on."""


@emitted(types.void, types.uint32, types.int64)
def copy_4(emit: Emitter, shared: Value, address: Value) -> None:
    emit.copy_4_async(shared, address)


@emitted(types.void, types.uint32, types.int64)
def store_scale_and_sums(emit: Emitter, shared: Value, address: Value) -> None:
    """Scale and both sums of a block of activations, as 16 bytes, to a scale and a word of two integers."""
    loaded = emit.load_recent(address, 0, 4)
    halves = [emit.to_half_integer(emit.as_float(loaded[i])) for i in (1, 3)]
    emit.store_shared_words(shared, 0, [loaded[0], emit.pack_low_halves(*halves)])


@emitted(types.void, types.int32)
def join_team(emit: Emitter, barrier: Value) -> None:
    """Wait for the warps of a team."""
    emit.asm(f"bar.sync $0,{TEAM_THREADS};", "", "r", [barrier], ordered=True)


def build_store_sums(n: int) -> Any:
    @emitted(types.void, types.UniTuple(types.float32, n), types.uint32)
    def store_sums(emit: Emitter, values: list[Value], at: Value) -> None:
        for i, value in enumerate(values):
            emit.store_shared_words(at, 128 * i, [emit.as_word(value)])

    return store_sums


def team_bytes(weight_type: GGMLQuantizationType, n_vectors: int, n_cols: int, n_teams: int) -> int:
    """Shared memory of a block: vectors, their scales and sums, sums of warps, stages of every warp."""
    n_places = 4 if n_vectors <= 4 else 8
    of_warp = n_places * 128 + N_STAGES * STAGE_BYTES[weight_type]
    return n_places * n_cols + n_places * n_cols // 4 + n_teams * TEAM_WARPS * of_warp


@emitted(types.void)
def wait_stage(emit: Emitter) -> None:
    """Wait for this thread's copies of the oldest stage that is under way."""
    emit.asm(f"cp.async.wait_group {N_STAGES - 2};", "", "", [], ordered=True)


@kernel_builder
def build_team_matvec_kernel(
    weight_type: GGMLQuantizationType,
    n_vectors: int,
    n_cols: int,
    is_added: bool,
    n_teams: int,
    activation: Activation | None = None,
) -> Kernel:
    """The kernel for one weight type, number of vectors and row length. Teams of four warps share the tiles.

    ``activation``: of two matrices instead of up to three, and the result is ``activation(gate) * up``.
    """
    n_blocks, n_threads = n_cols // 256, n_teams * TEAM_THREADS
    tile_of = TeamTile(weight_type, n_vectors, n_blocks)
    begin, bring, accumulate = tile_of.begin, tile_of.bring, tile_of.add
    zeros, total_of = tile_of.zeros, tile_of.total
    n_places, n_own = tile_of.n_places, tile_of.n_own
    place_bits = n_places.bit_length() - 1
    block_bytes, scale_bytes = tile_of.block_bytes, tile_of.scale_bytes
    scales_offset = n_places * n_cols
    sums_offset = scales_offset + n_places * n_cols // 4
    part_bytes = 2 * n_own * 128
    buffer_bytes = TEAM_WARPS * part_bytes
    stages_offset = sums_offset + n_teams * 2 * buffer_bytes
    stage_bytes = STAGE_BYTES[weight_type]
    store_sums = build_store_sums(2 * n_own)
    is_gated = activation is not None
    gated_value = build_gated_end(activation or Activation.SILU)

    @device_function
    def place_tile(tile, is_up, tiles_0, tiles_1, planes, strides, rows):
        """Addresses of the first row in each plane; matrix, first row and first of its own."""
        matrix, n_rows = int32(0), rows[0]
        plane_0, plane_1, plane_2, plane_3 = planes[0], planes[1], planes[2], planes[3]
        if is_up == int32(1):
            plane_0, plane_1, plane_2, plane_3 = planes[4], planes[5], planes[6], planes[7]
        if tile >= tiles_0:
            tile = int32(tile - tiles_0)
            matrix, n_rows = int32(1), rows[1]
            plane_0, plane_1, plane_2, plane_3 = planes[4], planes[5], planes[6], planes[7]
            if tile >= tiles_1:
                tile = int32(tile - tiles_1)
                matrix, n_rows = int32(2), rows[2]
                plane_0, plane_1, plane_2, plane_3 = planes[8], planes[9], planes[10], planes[11]
        own_row = int32(tile * int32(TILE_ROWS))
        row = int32(min(own_row, int32(n_rows - int32(TILE_ROWS))))
        first = int64(row)
        return (
            (
                plane_0 + first * strides[0],
                plane_1 + first * strides[1],
                plane_2 + first * strides[2],
                plane_3 + first * strides[3],
            ),
            matrix,
            row,
            own_row,
        )

    @device_function
    def bring_next(stage_at, coming, places, planes, strides, rows, own, lane):
        """Start the copies of the next block of this warp, if there is one; what comes after that."""
        tile, is_up, block, at = coming
        n_tiles, tile_step, tiles_0, tiles_1 = places
        if tile < n_tiles and block < int32(n_blocks):
            at = bring(stage_at, at, lane)
            block = int32(block + int32(4))
            if block >= int32(n_blocks):
                block = own
                if is_gated and is_up == int32(0):
                    is_up = int32(1)
                else:
                    tile, is_up = int32(tile + tile_step), int32(0)
                held = int32(min(tile, int32(n_tiles - int32(1))))
                first, _, _, _ = place_tile(held, is_up, tiles_0, tiles_1, planes, strides, rows)
                at = begin(first, strides, own, lane)
        commit_copies()
        return tile, is_up, block, at

    def team_matvec_kernel(planes, strides, outs, biases, rows, vectors, scales, _):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        tid = int32(cuda.threadIdx.x)
        warp, lane = warp_uniform(tid >> int32(5)), tid & int32(31)
        team, own = int32(warp >> int32(2)), int32(warp & int32(3))
        g, t = int32(lane >> int32(2)), int32(lane & int32(3))
        tiles_0 = int32(int32(rows[0] + int32(15)) >> int32(4))
        tiles_1 = int32(int32(rows[1] + int32(15)) >> int32(4))
        if is_gated:
            tiles_1 = int32(0)
        n_tiles = int32(tiles_0 + tiles_1 + (int32(rows[2] + int32(15)) >> int32(4)))
        tile = int32(int32(cuda.blockIdx.x) * int32(n_teams) + team)
        tile_step = int32(int32(cuda.gridDim.x) * int32(n_teams))
        places = (n_tiles, tile_step, tiles_0, tiles_1)
        stages_at = uint32(start + uint32(stages_offset) + uint32(warp) * uint32(N_STAGES * stage_bytes))
        held = int32(min(tile, int32(n_tiles - int32(1))))
        first_at, _, _, _ = place_tile(held, int32(0), tiles_0, tiles_1, planes, strides, rows)
        coming = (tile, int32(0), own, begin(first_at, strides, own, lane))
        for stage in range(N_STAGES - 1):
            stage_at = uint32(stages_at + uint32(stage) * uint32(stage_bytes))
            coming = bring_next(stage_at, coming, places, planes, strides, rows, own, lane)
        wait_for_previous()

        # a thread has the same piece of the same vector of every unit that it copies, and of every pair of groups
        piece, place = int32(tid & int32(15)), int32(int32(tid >> int32(4)) & int32(n_places - 1))
        within = int32(int32(piece >> int32(2)) << int32(2)) + int32(int32(piece & int32(1)) << int32(4))
        within = int32(within + int32(int32(piece & int32(2)) << int32(6)))
        vector = vectors + int64(int32(min(place, int32(n_vectors - 1)))) * int64(n_cols) + int64(within)
        unit = int32(tid >> int32(4 + place_bits))
        at = uint32(start + uint32(int32(tid << int32(2))))
        while unit < int32(n_blocks * 4):
            column = int32(int32(int32(unit >> int32(2)) << int32(8)) + int32(int32(unit & int32(3)) << int32(5)))
            copy_4(at, vector + int64(column))
            at = uint32(at + uint32(4 * n_threads))
            unit = int32(unit + int32(n_threads // (16 * n_places)))
        place, entry = int32(tid & int32(n_places - 1)), int32(tid >> int32(place_bits))
        of_vector = scales + int64(int32(min(place, int32(n_vectors - 1)))) * int64(n_cols // 2)
        at = uint32(start + uint32(scales_offset) + uint32(int32(tid << int32(3))))
        while entry < int32(n_blocks * 8):
            pair, unit = int32(entry & int32(1)), int32(entry >> int32(1))
            x_block = int32(int32(unit >> int32(2)) << int32(3)) + int32(unit & int32(3))
            x_block = int32(x_block + int32(pair << int32(2)))
            store_scale_and_sums(at, of_vector + int64(x_block) * 16)
            at = uint32(at + uint32(8 * n_threads))
            entry = int32(entry + int32(n_threads // n_places))
        wait_all_copies()
        cuda.syncthreads()

        team_at = uint32(start + uint32(sums_offset) + uint32(team) * uint32(2 * buffer_bytes))
        lane_at = uint32(lane << int32(2))
        buffer, is_up = int32(0), int32(0)
        gate = float32(0.0)
        stage, free_stage = int32(0), int32(N_STAGES - 1)
        while tile < n_tiles:
            next_tile, next_up = int32(tile + tile_step), int32(0)
            if is_gated and is_up == int32(0):
                next_tile, next_up = tile, int32(1)
            _, matrix, row, own_row = place_tile(tile, is_up, tiles_0, tiles_1, planes, strides, rows)
            sums = zeros()
            block = own
            while block < int32(n_blocks):
                wait_stage()
                cuda.syncwarp(FULL_WARP)
                free_at = uint32(stages_at + uint32(free_stage) * uint32(stage_bytes))
                coming = bring_next(free_at, coming, places, planes, strides, rows, own, lane)
                stage_at = uint32(stages_at + uint32(stage) * uint32(stage_bytes))
                x_at = uint32(start + uint32(block) * uint32(block_bytes))
                scales_at = uint32(start + uint32(scales_offset) + uint32(block) * uint32(scale_bytes))
                first = int32(int32(row * int32(n_blocks)) + block)
                sums = accumulate(sums, stage_at, first, x_at, scales_at, lane)
                free_stage = stage
                stage = int32(stage + int32(1))
                if stage == int32(N_STAGES):
                    stage = int32(0)
                block = int32(block + int32(4))
            parts_at = uint32(team_at + uint32(buffer) * uint32(buffer_bytes))
            store_sums(total_of(sums), uint32(parts_at + uint32(own) * uint32(part_bytes) + lane_at))
            join_team(int32(team + int32(1)))
            if own < int32(2 * n_own):
                part = uint32(parts_at + uint32(own) * uint32(128) + lane_at)
                a, b = load_shared_float(part), load_shared_float(uint32(part + uint32(part_bytes)))
                c = load_shared_float(uint32(part + uint32(2 * part_bytes)))
                d = load_shared_float(uint32(part + uint32(3 * part_bytes)))
                total = add(add(a, b), add(c, d))
                out, bias, n_rows = outs[0], biases[0], rows[0]
                if matrix == int32(1):
                    out, bias, n_rows = outs[1], biases[1], rows[1]
                if matrix == int32(2):
                    out, bias, n_rows = outs[2], biases[2], rows[2]
                vector, of_row = int32(t), int32(row + g + int32(own << int32(3)))
                if n_own == 2:
                    vector = int32(int32(t << int32(1)) + int32(own & int32(1)))
                    of_row = int32(row + g + int32(int32(own >> int32(1)) << int32(3)))
                if is_gated:
                    given = total
                    total = gated_value(gate, total)
                    gate = given
                if vector < int32(n_vectors) and of_row >= own_row and (not is_gated or is_up == int32(1)):
                    if bias != 0:
                        total = add(total, load_float(bias + int64(of_row) * 4))
                    at_out = out + (int64(vector) * n_rows + of_row) * 4
                    if is_added:
                        total = add(load_float_past_l1(at_out), total)
                    store_float(at_out, total)
            buffer = int32(buffer ^ int32(1))
            tile, is_up = next_tile, next_up

    n_bytes = team_bytes(weight_type, n_vectors, n_cols, n_teams)
    return Kernel(
        team_matvec_kernel,
        SIGNATURE,
        n_threads=n_threads,
        min_blocks=1,
        dynamic_bytes=n_bytes,
        shared_limit=SHARED_LIMIT if n_bytes <= SHARED_LIMIT else SHARED_LIMIT_90,
        overlaps=True,
    )


def team_kernel(
    weight_type: GGMLQuantizationType,
    n_vectors: int,
    rows: Sequence[int],
    n_cols: int,
    *,
    is_added: bool = False,
    activation: Activation | None = None,
) -> tuple[Kernel, tuple[int]] | None:
    """The kernel of a launch for matrices of these rows, and its grid: all blocks run at once and share the tiles.

    None where lanes take less time, or where what a block needs does not fit the shared memory.
    """
    if weight_type not in TEAM_TYPES or n_vectors < _LEAST_VECTORS[weight_type] or min(rows) < TILE_ROWS:
        return None
    limit = SHARED_LIMIT_90 if can_stream() else SHARED_LIMIT
    fitting = [
        n for n in range(2, _MOST_TEAMS[weight_type] + 1) if team_bytes(weight_type, n_vectors, n_cols, n) <= limit
    ]
    if not fitting:
        return None
    n_tiles, n_blocks = sum(ceil_div(n_rows, TILE_ROWS) for n_rows in rows), device_multiprocessors()
    n_teams = choose_teams(fitting[1:] or fitting, n_tiles, n_blocks)  # two alone leave too much waiting
    kernel = build_team_matvec_kernel(weight_type, n_vectors, n_cols, is_added, n_teams, activation)
    return kernel, (min(n_blocks, ceil_div(n_tiles, n_teams)),)


def choose_teams(candidates: Sequence[int], n_tiles: int, n_multiprocessors: int) -> int:
    """Teams of a block that take the least time, the more of two that take as long; no bit depends on it.

    Teams share what a multiprocessor can do, so a round of tiles takes about as long as there are teams. On an H200
    17408 rows are 8.2 tiles a multiprocessor: three teams, three rounds; four, five and six teams take 7 to 19 % longer
    (Q2_K, four vectors), and two 16 %, in five rounds. Of 4096 x 4096 two take 15 % longer than three, in one round.
    """
    return min(candidates, key=lambda n: (n * ceil_div(n_tiles, n * n_multiprocessors), -n))
