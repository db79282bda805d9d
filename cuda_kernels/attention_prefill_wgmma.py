"""Prefill attention for compute capability 9.0: products of warpgroups, tiles brought by warps of their own.

The arithmetic is that of ``attention_prefill`` in other tiles and another order of additions: bits differ between the
two kernels, and so between devices, but not between arenas. Which one runs: ``kvs_core.cuda_scratch``.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba import cuda
from numba.cuda import float32, int32, int64, types, uint32

from cuda_kernels.attention_common import LOG2_E
from cuda_kernels.intrinsics import FULL_WARP, shared_address
from cuda_kernels.launch import SHARED_LIMIT_90, Kernel, device_function, kernel_builder
from cuda_kernels.panel_copies import (
    BARRIER_BYTES,
    FREE,
    STAGE_BARRIER_BYTES,
    PanelCopies,
    build_bring_tiles,
)
from cuda_kernels.prefill_pieces import load_query_piece, store_int, store_piece
from cuda_kernels.prefill_tiles import PIECE_ELEMENTS
from cuda_kernels.warpgroup import (
    PANEL_BYTES,
    ROW_GROUP_BYTES,
    WARPGROUP_THREADS,
    announce,
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

N_GROUPS = 2  # warpgroups that compute; a third brings tiles
ROWS_OF_GROUP = 64
BLOCK_ROWS = N_GROUPS * ROWS_OF_GROUP
COMPUTE_THREADS = N_GROUPS * WARPGROUP_THREADS
COMPUTE_WARPS = COMPUTE_THREADS // 32
N_STAGES = 2  # places of a key tile, and of a value tile
LEAST_COPY_THREADS = 64
SLOW_TYPES = (KvType.BF16, KvType.Q5_1, KvType.Q5_0, KvType.IQ4_NL, KvType.TURBO4, KvType.TURBO3)
"""Tiles of these are converted by twice as many threads where registers allow it, which is up to head size 128.

One H200, 2048 x 32768, head size 128, TFLOP/s: turbo4 524 and 544, turbo3 463 and 540, q5_1 469 and 533, bf16 464 and
515, iq4_nl 348 and 516; but q4_0 581 and 565, q8_0 532 and 506.
"""
ALIGNMENT = ROW_GROUP_BYTES  # of a tile that a descriptor describes


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaShape:
    """Sizes that follow from the page layout alone, so that a row's bits depend on nothing else on this device.

    | queries | keys 0 | values 0 | keys 1 | values 1 | row limits | barriers |
    """

    page: PageGeometry

    @property
    def is_wide(self) -> bool:
        """Registers hold the sums of a wide head, and then only half as many scores beside them."""
        return max(self.page.head_dim_k, self.page.head_dim_v) > 128

    @property
    def tile_keys(self) -> int:
        """Keys of a tile: a divisor of a page's."""
        return 64 if self.is_wide or self.page.page_tokens % 128 else 128

    @property
    def takes_turns(self) -> bool:
        """One warpgroup starts its products while the other makes probabilities.

        One H200, 2048 x 32768, f16: 652 instead of 621 TFLOP/s at head size 128, but 688 instead of 705 at 256.
        """
        return not self.is_wide

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that computes and of one that brings tiles: converting takes more than copying."""
        is_direct = self.page.type_k is KvType.F16 and self.page.type_v is KvType.F16
        if self.copy_threads > LEAST_COPY_THREADS:
            return 192, 64
        return (240, 24) if is_direct else (208, 88)

    @property
    def copy_threads(self) -> int:
        """Threads that bring the tiles of one region."""
        is_slow = not {self.page.type_k, self.page.type_v}.isdisjoint(SLOW_TYPES)
        return 2 * LEAST_COPY_THREADS if is_slow and not self.is_wide else LEAST_COPY_THREADS

    @property
    def n_threads(self) -> int:
        return COMPUTE_THREADS + 2 * self.copy_threads

    def copies(self) -> tuple[PanelCopies, PanelCopies]:
        """Of keys and of values."""
        regions = (self.page.k_region, self.page.v_region)
        k, v = (PanelCopies(region, self.tile_keys, self.copy_threads) for region in regions)
        return k, v

    @property
    def state_floats(self) -> int:
        """float32 numbers that a block stores between spans."""
        return COMPUTE_THREADS * (self.page.head_dim_v // 2 + 4)


@kernel_builder
def build_attention_prefill_wgmma_kernel(page: PageGeometry, gqa_ratio: int, softcap: float, has_sinks: bool) -> Kernel:
    """The kernel for one page layout and one number of query heads per KV head, a cap of scores (0: none) and sinks.

    A block owns 128 query rows of one KV head (row = token * gqa_ratio + head of the group), 64 a warpgroup. The last
    four or eight warps only bring tiles; barriers in shared memory say which tile is there and which place is free. The
    scores of a tile are under way while the values of the tile before are added up, and both while probabilities are
    made: 652 instead of 565 TFLOP/s at head size 128, 688 instead of 655 at 256 (one H200, 2048 x 32768, f16).
    """
    shape = WgmmaShape(page=page)
    tile_keys, takes_turns, copy_threads = shape.tile_keys, shape.takes_turns, shape.copy_threads
    fragments = WgmmaFragments(
        page.head_dim_k, page.head_dim_v, BLOCK_ROWS, tile_keys, gqa_ratio=gqa_ratio, softcap=softcap
    )
    k_copies, v_copies = shape.copies()
    head_dim_k, head_dim_v, n_head_kv, page_tokens = page.head_dim_k, page.head_dim_v, page.n_head_kv, page.page_tokens
    n_head, n_pieces = n_head_kv * gqa_ratio, head_dim_k // PIECE_ELEMENTS
    query_bytes = fragments.q_panels.n_bytes
    k_tile_bytes, pair_bytes = k_copies.rows.n_bytes, k_copies.rows.n_bytes + v_copies.rows.n_bytes
    limits_offset = query_bytes + N_STAGES * pair_bytes
    barriers_offset = limits_offset + 4 * BLOCK_ROWS
    state_bytes = 4 * shape.state_floats
    take_registers = limit_registers(shape.registers[0], more=True)
    give_registers = limit_registers(shape.registers[1], more=False)
    initial_state, are_ones = fragments.initial_state, fragments.are_ones
    probabilities, new_state, factors = fragments.probabilities, fragments.new_state, fragments.factors
    stored_sums, stored_state = fragments.stored_sums, fragments.stored_state
    place_query, zeros, hide = fragments.place_query, fragments.zeros, fragments.hide
    softmax, rescale, pack = fragments.softmax, fragments.rescale, fragments.pack
    start_scores, scores_ready, all_ready = fragments.start_scores, fragments.scores_ready, fragments.all_ready
    start_sums, sums_ready = fragments.start_sums, fragments.sums_ready
    normalise, load_state, store_state = fragments.normalise, fragments.load_state, fragments.store_state
    normalise_with, load_sinks = fragments.normalise_with, fragments.load_sinks
    is_capped, cap = softcap > 0.0, fragments.cap
    store_row_0, store_row_1 = fragments.store_rows
    bring_keys, bring_values = (
        build_bring_tiles(
            copies, first_region=offset, page_tokens=page_tokens, stage_bytes=pair_bytes, n_stages=N_STAGES
        )
        for copies, offset in ((k_copies, 0), (v_copies, page.v_offset))
    )

    def attention_prefill_wgmma_kernel(
        q, pages, state, out, n_tokens, first_position, key_begin, key_end, window, scale, is_first, is_last, sinks
    ):
        start = shared_address(cuda.shared.array(0, float32, alignment=16))
        shared = uint32((start + uint32(ALIGNMENT - 1)) & uint32(0xFFFFFFFF - (ALIGNMENT - 1)))
        keys_at, values_at = uint32(shared + uint32(query_bytes)), uint32(shared + uint32(query_bytes + k_tile_bytes))
        limits_at = uint32(shared + uint32(limits_offset))
        key_barriers = uint32(shared + uint32(barriers_offset))
        value_barriers = uint32(key_barriers + uint32(BARRIER_BYTES))

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

        if tid < BLOCK_ROWS:
            # in shared memory, because few tiles need them and the registers are full
            store_int(uint32(limits_at + uint32(tid * 4)), first_position + (first_row + tid) // int32(gqa_ratio) + 1)
        if tid < N_STAGES * (STAGE_BARRIER_BYTES // BARRIER_BYTES):
            is_free = tid * int32(BARRIER_BYTES) % int32(STAGE_BARRIER_BYTES) >= int32(FREE)
            count = int32(COMPUTE_WARPS) if is_free else int32(copy_threads)
            init_barrier(uint32(key_barriers + uint32(tid * int32(BARRIER_BYTES))), count)
        cuda.syncthreads()

        if warp >= int32(COMPUTE_WARPS):
            give_registers()
            thread = uint32(tid) % uint32(copy_threads)
            if warp < int32(COMPUTE_WARPS + copy_threads // 32):
                bring_keys(keys_at, key_barriers, pages, head_kv, first_key, key_end, n_tiles, thread)
            else:
                bring_values(values_at, value_barriers, pages, head_kv, first_key, key_end, n_tiles, thread)
        else:
            take_registers()
            group = warp >> int32(2)
            is_lane_0 = int32(lane == 0)
            query_at = uint32(shared + uint32(group * int32(ROWS_OF_GROUP * PANEL_BYTES)))
            limits_here = uint32(limits_at + uint32((warp * int32(16) + g) * int32(4)))
            column = int32(2) * t
            least = min(upper_least, key_end)
            scale_log2 = product_scale = scale * float32(LOG2_E)
            if is_capped:
                scale_log2 = float32(1.0)

            # while the first keys arrive; four pieces are read before the first is written
            for i in range(tid, BLOCK_ROWS * n_pieces, 4 * COMPUTE_THREADS):
                j, k, m = i + COMPUTE_THREADS, i + 2 * COMPUTE_THREADS, i + 3 * COMPUTE_THREADS
                piece_i = load_query_piece(q + query_offset(int32(i), first_row, n_rows, first_head))
                piece_j = load_query_piece(q + query_offset(int32(j), first_row, n_rows, first_head))
                piece_k = load_query_piece(q + query_offset(int32(k), first_row, n_rows, first_head))
                piece_m = load_query_piece(q + query_offset(int32(m), first_row, n_rows, first_head))
                store_piece(place_query(shared, uint32(i) // uint32(n_pieces), uint32(i) % uint32(n_pieces)), piece_i)
                store_piece(place_query(shared, uint32(j) // uint32(n_pieces), uint32(j) % uint32(n_pieces)), piece_j)
                store_piece(place_query(shared, uint32(k) // uint32(n_pieces), uint32(k) % uint32(n_pieces)), piece_k)
                store_piece(place_query(shared, uint32(m) // uint32(n_pieces), uint32(m) % uint32(n_pieces)), piece_m)
            fence_tensor_reads()
            meet(int32(3), int32(COMPUTE_THREADS))

            sums = zeros()
            softmax_state = initial_state()
            if is_first == 0:
                stored = load_state(state + state_offset(warp, lane))
                sums = stored_sums(stored)
                softmax_state = stored_state(stored)

            if n_tiles > 0:
                wait_barrier(key_barriers, uint32(0))
                s = all_ready(start_scores(query_at, keys_at))
                arrive_if(uint32(key_barriers + uint32(FREE)), is_lane_0)
                if is_capped:
                    s = cap(s, product_scale)
                if first_key + int32(tile_keys) > least or first_key < lower_most:
                    s = hide(s, first_key + column, limits_here, window)
                folded = softmax(s, softmax_state, scale_log2)
                softmax_state = new_state(folded)
                packed = pack(probabilities(folded))
                if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):  # a factor of 1 changes no bit
                    sums = rescale(sums, factors(folded))

                if takes_turns and group == 1:
                    announce(int32(1), int32(COMPUTE_THREADS))
                for tile in range(1, n_tiles):
                    stage, phase = stage_of(int32(tile)), phase_of(int32(tile))
                    last_stage, last_phase = stage_of(int32(tile) - int32(1)), phase_of(int32(tile) - int32(1))
                    key_barrier = uint32(key_barriers + uint32(stage) * uint32(STAGE_BARRIER_BYTES))
                    value_barrier = uint32(value_barriers + uint32(last_stage) * uint32(STAGE_BARRIER_BYTES))
                    key = first_key + int32(tile) * int32(tile_keys)

                    wait_barrier(key_barrier, phase)
                    if takes_turns:
                        meet(int32(1) + group, int32(COMPUTE_THREADS))
                    s = start_scores(query_at, uint32(keys_at + uint32(stage) * uint32(pair_bytes)))
                    wait_barrier(value_barrier, last_phase)
                    sums = start_sums(sums, packed, uint32(values_at + uint32(last_stage) * uint32(pair_bytes)))
                    if takes_turns:
                        announce(int32(2) - group, int32(COMPUTE_THREADS))

                    s = scores_ready(s)
                    arrive_if(uint32(key_barrier + uint32(FREE)), is_lane_0)
                    if is_capped:
                        s = cap(s, product_scale)
                    if key + int32(tile_keys) > least or key < lower_most:
                        s = hide(s, key + column, limits_here, window)
                    folded = softmax(s, softmax_state, scale_log2)
                    softmax_state = new_state(folded)

                    sums = sums_ready(sums)
                    arrive_if(uint32(value_barrier + uint32(FREE)), is_lane_0)
                    packed = pack(probabilities(folded))
                    if not cuda.all_sync(FULL_WARP, are_ones(factors(folded))):
                        sums = rescale(sums, factors(folded))
                if takes_turns and group == 0:
                    meet(int32(1), int32(COMPUTE_THREADS))  # the other's last announcement

                last_stage, last_phase = stage_of(n_tiles - int32(1)), phase_of(n_tiles - int32(1))
                wait_barrier(uint32(value_barriers + uint32(last_stage) * uint32(STAGE_BARRIER_BYTES)), last_phase)
                value_at = uint32(values_at + uint32(last_stage) * uint32(pair_bytes))
                sums = sums_ready(start_sums(sums, packed, value_at))

            if is_last == 0:
                store_state(state + state_offset(warp, lane), sums, softmax_state)
            else:
                if has_sinks:
                    of_rows = load_sinks(sinks, first_head, first_row + warp * int32(16) + g)
                    sums = normalise_with(sums, softmax_state, of_rows, scale_log2)
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
    def query_offset(i, first_row, n_rows, first_head):
        """Bytes from the start of the queries to piece ``i`` of the block; rows beyond the last repeat it."""
        row = min(first_row + i // int32(n_pieces), n_rows - int32(1))
        head = first_head + row % int32(gqa_ratio)
        return ((int64(row // int32(gqa_ratio)) * n_head + head) * n_pieces + i % int32(n_pieces)) * (
            4 * PIECE_ELEMENTS
        )

    @device_function
    def stage_of(tile):
        """Place of a tile among the alternating ones."""
        return tile % int32(N_STAGES)

    @device_function
    def phase_of(tile):
        """Parity of the phase of its place's barriers that ends when the tile is there."""
        return uint32(tile // int32(N_STAGES) & int32(1))

    @device_function
    def state_offset(warp, lane):
        """Bytes from the start of the state to this lane's first number."""
        return int64(cuda.blockIdx.x) * state_bytes + int64(warp) * (state_bytes // COMPUTE_WARPS) + int64(lane) * 4

    @device_function
    def row_offset(row, first_head):
        """Bytes from the start of the output to a query row."""
        token = int64(row) // gqa_ratio
        return (token * n_head + first_head + int64(row) % gqa_ratio) * (4 * head_dim_v)

    signature = [types.int64] * 4 + [types.int32] * 5 + [types.float32] + [types.int32] * 2 + [types.int64]
    return Kernel(
        attention_prefill_wgmma_kernel,
        signature,
        n_threads=shape.n_threads,
        min_blocks=1,
        dynamic_bytes=barriers_offset + N_STAGES * STAGE_BARRIER_BYTES + ALIGNMENT,
        shared_limit=SHARED_LIMIT_90,
        is_whole=True,
    )
