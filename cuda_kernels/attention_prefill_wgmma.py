"""Prefill attention for compute capability 9.0: products of warpgroups, tiles brought by warps of their own.

The arithmetic, tile by tile, is that of ``attention_prefill`` in another order of additions: bits differ between
the two kernels, and so between devices, but not between arenas. Selection is in ``attention_prefill``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E
from cuda_kernels.intrinsics import FULL_WARP, load_address, shared_address, wait_all_copies
from cuda_kernels.launch import Kernel, device_function
from cuda_kernels.panel_copies import PanelCopies
from cuda_kernels.prefill_pieces import load_query_piece, store_int, store_piece
from cuda_kernels.prefill_tiles import PIECE_ELEMENTS
from cuda_kernels.warpgroup import (
    WARPGROUP_THREADS,
    announce,
    arrive_after_copies,
    arrive_if,
    fence_tensor_reads,
    init_barrier,
    limit_registers,
    meet,
    wait_barrier,
    warp_uniform,
)
from cuda_kernels.wgmma_tiles import WgmmaFragments
from kvs_core.kv_types import KvType, PageGeometry

N_GROUPS = 2  # warpgroups that compute
ROWS_OF_GROUP = 64
BLOCK_ROWS = N_GROUPS * ROWS_OF_GROUP
COMPUTE_THREADS = N_GROUPS * WARPGROUP_THREADS
COMPUTE_WARPS = COMPUTE_THREADS // 32
TILE_ALIGNMENT = 1024
BARRIER_BYTES = 8
BARRIERS_OF_STAGE = 4  # keys full, values full, keys free, values free


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaShape:
    """Sizes that follow from the page layout alone, so that a row's bits depend on nothing else on this device.

    | queries | keys 0 | values 0 | keys 1 | values 1 | row limits | barriers |
    """

    page: PageGeometry
    tile_limit: int = 0
    n_stages: int = 2
    copy_warps: int = 4
    is_pipelined: bool = True
    takes_turns: bool = True
    fences: bool = True
    n_chains: int = 4

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: a divisor of a page's, and as many as registers and shared memory hold."""
        most = self.tile_limit or (64 if max(self.page.head_dim_k, self.page.head_dim_v) > 128 else 128)
        return most if self.page.page_tokens % most == 0 else 64

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes and of one that brings tiles: converting takes more than copying."""
        is_direct = self.page.type_k is KvType.F16 and self.page.type_v is KvType.F16
        return (240, 24) if is_direct else (216, 72)

    @property
    def n_threads(self) -> int:
        return COMPUTE_THREADS + 32 * self.copy_warps

    def copies(self) -> tuple[PanelCopies, PanelCopies]:
        """Of keys and of values."""
        k, v = (
            PanelCopies(region, self.tile_keys, 32 * self.copy_warps)
            for region in (self.page.k_region, self.page.v_region)
        )
        return k, v

    @property
    def state_floats(self) -> int:
        """float32 numbers that a block stores between spans."""
        return COMPUTE_THREADS * (self.page.head_dim_v // 2 + 4)


@cache
def build_attention_prefill_wgmma_kernel(shape: WgmmaShape, gqa_ratio: int) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head.

    A block owns 128 query rows of one KV head (row = token * gqa_ratio + head of the group), 64 a warpgroup. The last
    warps only bring tiles; barriers in shared memory say which tile is there and which place is free again. The
    products of a tile with the queries run while the probabilities of the tile before are made.
    """
    page, tile_keys, n_stages = shape.page, shape.tile_keys, shape.n_stages
    fragments = WgmmaFragments(page.head_dim_k, page.head_dim_v, BLOCK_ROWS, tile_keys, shape.n_chains)
    k_copies, v_copies = shape.copies()
    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head, n_pieces = n_head_kv * gqa_ratio, head_dim_k // PIECE_ELEMENTS
    k_bytes, v_bytes, v_offset = page.k_region.n_bytes, page.v_region.n_bytes, page.v_offset
    query_bytes = fragments.q_panels.n_bytes
    k_tile_bytes, pair_bytes = k_copies.rows.n_bytes, k_copies.rows.n_bytes + v_copies.rows.n_bytes
    limits_offset = query_bytes + n_stages * pair_bytes
    barriers_offset = limits_offset + 4 * BLOCK_ROWS
    state_bytes, n_threads = 4 * shape.state_floats, shape.n_threads
    copy_threads = 32 * shape.copy_warps
    initial_state, are_ones = fragments.initial_state, fragments.are_ones
    probabilities, new_state, factors = fragments.probabilities, fragments.new_state, fragments.factors
    stored_sums, stored_state = fragments.stored_sums, fragments.stored_state
    place_query, zeros, hide = fragments.place_query, fragments.zeros, fragments.hide
    softmax, rescale, pack = fragments.softmax, fragments.rescale, fragments.pack
    start_scores, scores_ready, all_ready = fragments.start_scores, fragments.scores_ready, fragments.all_ready
    start_sums, sums_ready = fragments.start_sums, fragments.sums_ready
    normalise, load_state, store_state = fragments.normalise, fragments.load_state, fragments.store_state
    store_row_0, store_row_1 = fragments.store_rows
    start_all_k, start_some_k = k_copies.start_all, k_copies.start_some
    start_all_v, start_some_v = v_copies.start_all, v_copies.start_some
    load_k, convert_k, load_v, convert_v = k_copies.load, k_copies.convert, v_copies.load, v_copies.convert
    k_is_direct, v_is_direct = k_copies.is_direct, v_copies.is_direct
    take_registers = limit_registers(shape.registers[0], more=True)
    give_registers = limit_registers(shape.registers[1], more=False)
    is_pipelined, takes_turns, fences = shape.is_pipelined, shape.takes_turns, shape.fences

    def attention_prefill_wgmma_kernel(
        q, pages, state, out, n_tokens, first_position, key_begin, key_end, window, scale, is_first, is_last
    ):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        shared = uint32((start + uint32(TILE_ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (TILE_ALIGNMENT - 1)))
        limits_at = uint32(shared + uint32(limits_offset))
        barriers = uint32(shared + uint32(barriers_offset))

        tid = int32(cuda.threadIdx.x)
        warp, lane = warp_uniform(tid >> int32(5)), tid & int32(31)
        g, t = lane >> int32(2), lane & int32(3)
        head_kv = int32(cuda.blockIdx.x) % int32(n_head_kv)
        row_block = int32(cuda.gridDim.x) // int32(n_head_kv) - int32(1) - int32(cuda.blockIdx.x) // int32(n_head_kv)
        first_row = row_block * int32(BLOCK_ROWS)  # the last rows see the most keys: they start first
        n_rows = n_tokens * int32(gqa_ratio)
        first_head = head_kv * int32(gqa_ratio)

        # keys that any row of this block sees, and keys that every row sees
        last_row = min(first_row + int32(BLOCK_ROWS), n_rows) - int32(1)
        upper_most = min(first_position + last_row // int32(gqa_ratio) + int32(1), key_end)
        upper_least = first_position + first_row // int32(gqa_ratio) + int32(1)
        lower_least = max(upper_least - window, key_begin)
        lower_most = first_position + last_row // int32(gqa_ratio) + int32(1) - window
        first_key = lower_least // int32(tile_keys) * int32(tile_keys)
        n_tiles = max(upper_most - first_key + int32(tile_keys - 1), int32(0)) // int32(tile_keys)

        for i in range(tid, BLOCK_ROWS * n_pieces, n_threads):
            row = min(first_row + int32(i) // int32(n_pieces), n_rows - int32(1))
            piece = int32(i) % int32(n_pieces)
            head = first_head + row % int32(gqa_ratio)
            source = q + ((int64(row) // gqa_ratio * n_head + head) * head_dim_k + piece * PIECE_ELEMENTS) * 4
            place = place_query(shared, uint32(int32(i) // int32(n_pieces)), uint32(piece))
            store_piece(place, load_query_piece(source))
        if tid < BLOCK_ROWS:
            # in shared memory, because few tiles need them and the registers are full
            store_int(uint32(limits_at + uint32(tid * 4)), first_position + (first_row + tid) // int32(gqa_ratio) + 1)
        if tid < n_stages:
            barrier = stage_barrier(barriers, tid)
            init_barrier(barrier, int32(copy_threads))
            init_barrier(uint32(barrier + uint32(8)), int32(copy_threads))
            init_barrier(uint32(barrier + uint32(16)), int32(COMPUTE_WARPS))
            init_barrier(uint32(barrier + uint32(24)), int32(COMPUTE_WARPS))
        fence_tensor_reads()
        cuda.syncthreads()

        if warp >= int32(COMPUTE_WARPS):
            give_registers()
            copier = uint32(tid - int32(COMPUTE_THREADS))
            for tile in range(n_tiles):
                stage, free = (
                    int32(tile) % int32(n_stages),
                    uint32(int32(tile) // int32(n_stages) & int32(1)) ^ uint32(1),
                )
                barrier = stage_barrier(barriers, stage)
                k_at = uint32(shared + uint32(query_bytes) + uint32(stage) * uint32(pair_bytes))
                v_at = uint32(k_at + uint32(k_tile_bytes))
                key = first_key + int32(tile) * int32(tile_keys)
                page_address = load_address(pages + int64(key // int32(page_tokens)) * 8)
                k_region = page_address + int64(head_kv) * k_bytes
                v_region = page_address + (v_offset + int64(head_kv) * v_bytes)
                slot = key % int32(page_tokens)
                n_valid = key_end - key
                if k_is_direct:
                    wait_barrier(uint32(barrier + uint32(16)), free)
                    if n_valid >= int32(tile_keys):
                        start_all_k(k_at, k_region, slot, copier)
                    else:
                        start_some_k(k_at, k_region, slot, n_valid, copier)
                    arrive_after_copies(barrier)
                else:
                    loaded = load_k(k_region, slot, copier)
                    wait_barrier(uint32(barrier + uint32(16)), free)
                    convert_k(k_at, loaded, n_valid, copier)
                    fence_tensor_reads()
                    arrive_if(barrier, int32(1))
                if v_is_direct:
                    wait_barrier(uint32(barrier + uint32(24)), free)
                    if n_valid >= int32(tile_keys):
                        start_all_v(v_at, v_region, slot, copier)
                    else:
                        start_some_v(v_at, v_region, slot, n_valid, copier)
                    arrive_after_copies(uint32(barrier + uint32(8)))
                else:
                    loaded = load_v(v_region, slot, copier)
                    wait_barrier(uint32(barrier + uint32(24)), free)
                    convert_v(v_at, loaded, n_valid, copier)
                    fence_tensor_reads()
                    arrive_if(uint32(barrier + uint32(8)), int32(1))
            wait_all_copies()
        else:
            take_registers()
            group = warp >> int32(2)
            is_lane_0 = int32(lane == 0)
            query_at = uint32(shared + uint32(group * int32(ROWS_OF_GROUP)) * uint32(128))
            limits_here = uint32(limits_at + uint32((warp * int32(16) + g) * int32(4)))
            column = int32(2) * t
            least = min(upper_least, key_end)
            scale_log2 = scale * float32(LOG2_E)

            sums = zeros()
            softmax_state = initial_state()
            if is_first == 0:
                stored = load_state(state + state_offset(warp, lane))
                sums = stored_sums(stored)
                softmax_state = stored_state(stored)

            if takes_turns and group == 1:
                announce(int32(1), int32(COMPUTE_THREADS))
            if is_pipelined:
                if n_tiles > 0:
                    wait_barrier(barriers, uint32(0))
                    if fences:
                        fence_tensor_reads()
                    s = all_ready(start_scores(query_at, uint32(shared + uint32(query_bytes))))
                    arrive_if(uint32(barriers + uint32(16)), is_lane_0)
                    if first_key + int32(tile_keys) > least or first_key < lower_most:
                        s = hide(s, first_key + column, limits_here, window)
                    folded = softmax(s, softmax_state, scale_log2)
                    softmax_state = new_state(folded)
                    packed = pack(probabilities(folded))
                    if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):  # a factor of 1 changes no bit
                        sums = rescale(sums, factors(folded))
                    for tile in range(1, n_tiles):
                        stage, full = int32(tile) % int32(n_stages), uint32(int32(tile) // int32(n_stages) & int32(1))
                        barrier = stage_barrier(barriers, stage)
                        last = int32(tile) - int32(1)
                        last_stage, last_full = last % int32(n_stages), uint32(last // int32(n_stages) & int32(1))
                        last_barrier = stage_barrier(barriers, last_stage)
                        key = first_key + int32(tile) * int32(tile_keys)
                        wait_barrier(barrier, full)
                        if fences:
                            fence_tensor_reads()
                        if takes_turns:
                            meet(int32(1) + group, int32(COMPUTE_THREADS))
                        s = start_scores(
                            query_at, uint32(shared + uint32(query_bytes) + uint32(stage) * uint32(pair_bytes))
                        )
                        wait_barrier(uint32(last_barrier + uint32(8)), last_full)
                        if fences:
                            fence_tensor_reads()
                        sums = start_sums(
                            sums,
                            packed,
                            uint32(
                                shared + uint32(query_bytes + k_tile_bytes) + uint32(last_stage) * uint32(pair_bytes)
                            ),
                        )
                        if takes_turns:
                            announce(int32(2) - group, int32(COMPUTE_THREADS))
                        s = scores_ready(s)
                        arrive_if(uint32(barrier + uint32(16)), is_lane_0)
                        if key + int32(tile_keys) > least or key < lower_most:
                            s = hide(s, key + column, limits_here, window)
                        folded = softmax(s, softmax_state, scale_log2)
                        softmax_state = new_state(folded)
                        sums = sums_ready(sums)
                        arrive_if(uint32(last_barrier + uint32(24)), is_lane_0)
                        packed = pack(probabilities(folded))
                        if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):
                            sums = rescale(sums, factors(folded))
                    last = n_tiles - int32(1)
                    last_stage, last_full = last % int32(n_stages), uint32(last // int32(n_stages) & int32(1))
                    last_barrier = stage_barrier(barriers, last_stage)
                    wait_barrier(uint32(last_barrier + uint32(8)), last_full)
                    if fences:
                        fence_tensor_reads()
                    v_at = uint32(shared + uint32(query_bytes + k_tile_bytes) + uint32(last_stage) * uint32(pair_bytes))
                    sums = sums_ready(start_sums(sums, packed, v_at))
            else:
                for tile in range(n_tiles):
                    stage, full = int32(tile) % int32(n_stages), uint32(int32(tile) // int32(n_stages) & int32(1))
                    barrier = stage_barrier(barriers, stage)
                    key = first_key + int32(tile) * int32(tile_keys)
                    k_at = uint32(shared + uint32(query_bytes) + uint32(stage) * uint32(pair_bytes))
                    wait_barrier(barrier, full)
                    if fences:
                        fence_tensor_reads()
                    if takes_turns:
                        meet(int32(1) + group, int32(COMPUTE_THREADS))
                    s = all_ready(start_scores(query_at, k_at))
                    if takes_turns:
                        announce(int32(2) - group, int32(COMPUTE_THREADS))
                    arrive_if(uint32(barrier + uint32(16)), is_lane_0)
                    if key + int32(tile_keys) > least or key < lower_most:
                        s = hide(s, key + column, limits_here, window)
                    folded = softmax(s, softmax_state, scale_log2)
                    softmax_state = new_state(folded)
                    packed = pack(probabilities(folded))
                    if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):
                        sums = rescale(sums, factors(folded))
                    wait_barrier(uint32(barrier + uint32(8)), full)
                    if fences:
                        fence_tensor_reads()
                    sums = sums_ready(start_sums(sums, packed, uint32(k_at + uint32(k_tile_bytes))))
                    arrive_if(uint32(barrier + uint32(24)), is_lane_0)
            if takes_turns and group == 0:
                meet(int32(1), int32(COMPUTE_THREADS))

            if is_last == 0:
                store_state(state + state_offset(warp, lane), sums, softmax_state)
            else:
                sums = normalise(sums, softmax_state)
                out_at = out + int64(2 * t) * 4
                row_0 = first_row + warp * int32(16) + g
                row_1 = row_0 + int32(8)
                if row_0 < n_rows:
                    store_row_0(out_at + row_offset(row_0, first_head), sums)
                if row_1 < n_rows:
                    store_row_1(out_at + row_offset(row_1, first_head), sums)

    @device_function
    def stage_barrier(barriers, stage):
        """Address of the first barrier of a stage."""
        return uint32(barriers + uint32(stage) * uint32(BARRIERS_OF_STAGE * BARRIER_BYTES))

    @device_function
    def state_offset(warp, lane):
        """Bytes from the start of the state to this lane's first number."""
        return int64(cuda.blockIdx.x) * state_bytes + int64(warp) * (state_bytes // COMPUTE_WARPS) + int64(lane) * 4

    @device_function
    def row_offset(row, first_head):
        """Bytes from the start of the output to a query row."""
        token = int64(row) // gqa_ratio
        return (token * n_head + first_head + int64(row) % gqa_ratio) * (4 * head_dim_v)

    signature = [types.int64] * 4 + [types.int32] * 5 + [types.float32] + [types.int32] * 2
    return Kernel(
        attention_prefill_wgmma_kernel,
        signature,
        n_threads=n_threads,
        min_blocks=1,
        dynamic_bytes=barriers_offset + n_stages * BARRIERS_OF_STAGE * BARRIER_BYTES + TILE_ALIGNMENT,
        shared_limit=WGMMA_SHARED_LIMIT,
    )


WGMMA_SHARED_LIMIT = 227 * 1024
"""Shared memory a block may use on compute capability 9.0."""
