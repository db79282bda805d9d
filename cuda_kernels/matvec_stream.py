"""Products of ``matvec`` whose weights stream through shared memory, for compute capability 9.0."""

from __future__ import annotations

from collections.abc import Sequence

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.activation import Activation, build_gated_end
from cuda_kernels.intrinsics import (
    FULL_WARP,
    add,
    load_float,
    load_float_past_l1,
    shared_address,
    store_float,
)
from cuda_kernels.launch import (
    SHARED_LIMIT_90,
    Kernel,
    device_capability,
    device_function,
    device_multiprocessors,
    kernel_builder,
)
from cuda_kernels.overlap import wait_for_previous
from cuda_kernels.row_units import SIGNATURE, RowUnits
from cuda_kernels.vector_input import VectorInput, build_take_vector
from cuda_kernels.warpgroup import init_barrier, wait_barrier, warp_uniform
from cuda_kernels.weight_ring import BARRIER_BYTES, WeightRing, fence_barriers
from kvs_core.units import ceil_div

STREAM_CAPABILITY = (9, 0)
"""The device generation that these kernels are for: it copies in bulk and has 227 KiB of shared memory for a block."""
STREAM_SIGNATURE = (
    *SIGNATURE,
    types.int64,  # normalised floats, or 0
    types.float32,  # epsilon of the norm
)


@kernel_builder
def build_stream_matvec_kernel(
    ring: WeightRing,
    n_vectors: int,
    is_added: bool,
    kind: VectorInput = VectorInput.QUANTS,
    activation: Activation = Activation.SILU,
) -> Kernel:
    """The kernel for one shape of ring, number of vectors and kind of input; arithmetic and bits are ``matvec``'s.

    All blocks run at once and share the tiles (``ring.n_rows`` rows each) of up to three matrices; with a ring of two
    matrices the result is ``activation(gate) * up`` instead. A warp brings the parts of its tiles in order, waits for
    one, adds its steps to the sums, and fills the place anew.
    """
    begin, ask, take = build_take_vector(kind, 32 * ring.n_warps, ring.n_cols, in_halves=True)
    has_shared_vectors = ring.vector_bytes > 0
    n_warp_rows, n_warps, n_places = ring.n_rows, ring.n_warps, ring.n_places
    is_gated = ring.n_matrices == 2
    gated_value = build_gated_end(activation)
    units = RowUnits(ring.weight_type, ring.n_matrices * n_warp_rows, n_vectors, has_shared_vectors=has_shared_vectors)
    load_shared, accumulate, zeros, lane_total = units.load_shared, units.add, units.zeros, units.total
    n_results, lanes_per_total, n_units = n_warp_rows * n_vectors, units.lanes_per_total, ring.n_cols // units.elements
    bring = ring.build_bring()
    row_shift, n_cols = n_warp_rows.bit_length() - 1, ring.n_cols
    n_steps, n_chunks, last_bytes = ring.n_steps, ring.n_chunks, ring.last_bytes
    are_lanes_even = n_units % 32 == 0
    step_bytes, row_bytes, place_bytes, warp_bytes = ring.step_bytes, ring.row_bytes, ring.place_bytes, ring.warp_bytes
    rings_offset, vectors_offset, place_steps = ring.rings_offset, ring.vectors_offset, ring.place_steps

    @device_function
    def tile_address(tile, tiles_0, tiles_1, planes, rows, stride):
        plane, n_rows = planes[0], rows[0]
        if tile >= tiles_0:
            tile = int32(tile - tiles_0)
            plane, n_rows = planes[4], rows[1]
            if tile >= tiles_1:
                tile = int32(tile - tiles_1)
                plane, n_rows = planes[8], rows[2]
        row = int32(min(int32(tile * int32(n_warp_rows)), int32(n_rows - int32(n_warp_rows))))
        return plane + int64(row) * stride

    @device_function
    def bring_next(at, barrier, coming, tiles, matrices, lane):
        """Fill a place with what comes next, if anything does; the tile, part of its rows and address after that."""
        tile, chunk, address = coming
        n_tiles, tile_step, tiles_0, tiles_1 = tiles
        planes, rows, stride, up_offset = matrices
        if tile < n_tiles:
            n_bytes = int32(row_bytes) if int32(chunk + int32(1)) < int32(n_chunks) else int32(last_bytes)
            if is_gated:
                bring(at, barrier, address, int64(address + up_offset), stride, n_bytes, lane)
            else:
                bring(at, barrier, address, stride, n_bytes, lane)
            chunk = int32(chunk + int32(1))
            address += int64(row_bytes)
            if chunk == int32(n_chunks):
                chunk = int32(0)
                tile = int32(tile + tile_step)
                address = tile_address(
                    int32(min(tile, int32(n_tiles - int32(1)))), tiles_0, tiles_1, planes, rows, stride
                )
        return tile, chunk, address

    def stream_matvec_kernel(planes, strides, outs, biases, rows, vectors, scales, _, normed, eps):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        tid = int32(cuda.threadIdx.x)
        warp, lane = warp_uniform(tid >> int32(5)), tid & int32(31)
        own_ring = uint32(start + uint32(rings_offset) + uint32(warp) * uint32(warp_bytes))
        barriers = uint32(start + uint32(warp) * uint32(n_places * BARRIER_BYTES))
        stride = strides[0]
        tiles_0 = int32(int32(rows[0] + int32(n_warp_rows - 1)) >> int32(row_shift))
        tiles_1 = int32(int32(rows[1] + int32(n_warp_rows - 1)) >> int32(row_shift))
        if is_gated:
            tiles_1 = int32(0)
        up_offset = int64(planes[4] - planes[0])
        n_tiles = int32(tiles_0 + tiles_1 + (int32(rows[2] + int32(n_warp_rows - 1)) >> int32(row_shift)))
        first_tile = int32(warp * int32(cuda.gridDim.x) + int32(cuda.blockIdx.x))
        tile_step = int32(int32(n_warps) * int32(cuda.gridDim.x))

        lane_steps = int32(n_steps)
        if not are_lanes_even:
            lane_steps = int32(int32(int32(n_units) - lane + int32(31)) >> int32(5))

        if lane == 0:
            for place in range(n_places):
                init_barrier(uint32(barriers + uint32(place) * uint32(BARRIER_BYTES)), int32(1))
            fence_barriers()
        cuda.syncwarp(FULL_WARP)

        own_first = int32(min(first_tile, int32(n_tiles - int32(1))))
        coming = (first_tile, int32(0), tile_address(own_first, tiles_0, tiles_1, planes, rows, stride))
        tiles = (n_tiles, tile_step, tiles_0, tiles_1)
        matrices = (planes, rows, stride, up_offset)
        for place in range(n_places):
            at = uint32(own_ring + uint32(place) * uint32(place_bytes))
            barrier = uint32(barriers + uint32(place) * uint32(BARRIER_BYTES))
            coming = bring_next(at, barrier, coming, tiles, matrices, lane)
        begun = begin(scales, tid)
        wait_for_previous()
        vectors_at, scales_at = vectors, scales
        if has_shared_vectors:
            vectors_at = uint32(start + uint32(vectors_offset))
            scales_at = uint32(vectors_at + uint32(n_cols))
            asked = ask(vectors, scales, vectors_at, scales_at, tid)
            partials = uint32(scales_at + uint32(n_cols // 2))
            own_normed = normed if cuda.blockIdx.x == 0 else int64(0)
            take(begun, asked, vectors, scales, own_normed, eps, vectors_at, scales_at, partials, tid)

        place, parity = int32(0), int32(0)
        tile = first_tile
        while tile < n_tiles:
            sums = zeros()
            first_step = int32(0)
            while first_step < int32(n_steps):
                at = uint32(own_ring + uint32(place) * uint32(place_bytes))
                barrier = uint32(barriers + uint32(place) * uint32(BARRIER_BYTES))
                wait_barrier(barrier, uint32(parity))
                end_step = int32(min(int32(first_step + int32(place_steps)), lane_steps))
                row_at, step = at, first_step
                while step < end_step:
                    words = load_shared(row_at, int32(row_bytes), int32(0), lane)
                    sums = accumulate(sums, words, step, lane, vectors_at, scales_at, int32(n_cols))
                    row_at = uint32(row_at + uint32(step_bytes))
                    step = int32(step + int32(1))
                cuda.syncwarp(FULL_WARP)
                first_step = int32(first_step + int32(place_steps))
                coming = bring_next(at, barrier, coming, tiles, matrices, lane)
                place = int32(place + int32(1))
                if place == int32(n_places):
                    place = int32(0)
                    parity = int32(parity ^ int32(1))

            total = lane_total(sums, lane)
            own_tile, out, bias, n_rows = tile, outs[0], biases[0], rows[0]
            if own_tile >= tiles_0:
                own_tile = int32(own_tile - tiles_0)
                out, bias, n_rows = outs[1], biases[1], rows[1]
                if own_tile >= tiles_1:
                    own_tile = int32(own_tile - tiles_1)
                    out, bias, n_rows = outs[2], biases[2], rows[2]
            own_row = int32(own_tile * int32(n_warp_rows))
            row = int32(min(own_row, int32(n_rows - int32(n_warp_rows))))
            if is_gated:
                factor = cuda.shfl_sync(FULL_WARP, total, lane + int32(n_results * lanes_per_total))
                total = gated_value(total, factor)
            index = lane // int32(lanes_per_total)
            of_row = index // int32(n_vectors)
            if lane % int32(lanes_per_total) == 0 and index < int32(n_results) and row + of_row >= own_row:
                vector = index % int32(n_vectors)
                if bias != 0:
                    total = add(total, load_float(bias + int64(row + of_row) * 4))
                at_out = out + (int64(vector) * n_rows + row + of_row) * 4
                if is_added:
                    total = add(load_float_past_l1(at_out), total)
                store_float(at_out, total)
            tile = int32(tile + tile_step)

    return Kernel(
        stream_matvec_kernel,
        STREAM_SIGNATURE,
        n_threads=32 * n_warps,
        min_blocks=ring.n_blocks,
        dynamic_bytes=ring.n_bytes,
        shared_limit=SHARED_LIMIT_90,
        overlaps=True,
    )


def can_stream() -> bool:
    """Whether the current device is of that generation."""
    return device_capability() == STREAM_CAPABILITY


def stream_grid(ring: WeightRing, rows: Sequence[int]) -> tuple[int]:
    """Blocks for matrices of these rows: all run at once and share the rows."""
    n_tiles = sum(ceil_div(n_rows, ring.n_rows) for n_rows in rows)
    return (min(ring.n_blocks * device_multiprocessors(), ceil_div(n_tiles, ring.n_warps)),)
