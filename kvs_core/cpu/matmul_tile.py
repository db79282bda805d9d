"""The inner product kernel of ``matmul``: a few weight rows times a few tokens, all sums in registers.

No quantised weights and no loops over rows or tokens; ``matmul`` does those.

Every (row, token) pair has its own 16-lane accumulator that walks the inputs upwards, and its lanes are summed in
the tree of ``simd.sum_lanes``. So a result does not depend on how rows and tokens are grouped into tiles.
"""

# mypy: ignore-errors
# Emits LLVM instructions from Numba values, which Python's type system cannot describe.

from __future__ import annotations

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvs_core.cpu.scratch import ROW_GROUP
from kvs_core.cpu.vector_types import F32, I32, N_LANES, VECTOR_F32, call_llvm, constant, item_pointer

_I64 = ir.IntType(64)

# Tokens multiplied at once. With 32 registers of 512 bits: 4 x 6 accumulators, 4 weight vectors, 1 token vector;
# measured 174-206 GFLOP/s on one Zen 5 core at 2.6 GHz nominal, 8 x 3 and 2 x 12 were slower. Narrower registers
# hold a vector in two or four pieces and would spill that many.
HAS_WIDE_REGISTERS = bool(llvm.get_host_cpu_features().get("avx512f", False))
TOKEN_GROUP = 6 if HAS_WIDE_REGISTERS else 2


def build_tile_product(n_tokens: int):
    """A kernel function for ROW_GROUP rows, ``n_tokens`` tokens and one block of inputs.

    tile_product(tile, tile_begin, tile_stride, sums_begin, x, x_begin, x_stride, n_inputs, is_first, is_last,
                 out, out_begin, out_stride, n_rows)

    tile, x, out    float32 arrays; *_begin is the first element used, *_stride the distance of rows
    n_inputs        inputs in this block; when not a multiple of 16 the last vector of ``x`` overlaps the one before
                    it and the tile holds zeros in the overlapping lanes (``matmul_kernels`` arranges it so)
    is_first        sums start at 0; otherwise at what the block before left at ``tile[sums_begin:]``
    is_last         sums become results; otherwise they are left for the next block
    n_rows          how many of the ROW_GROUP results per token are written
    """

    @intrinsic
    def tile_product(
        typingctx,
        tile,
        tile_begin,
        tile_stride,
        sums_begin,
        x,
        x_begin,
        x_stride,
        n_inputs,
        is_first,
        is_last,
        out,
        out_begin,
        out_stride,
        n_rows,
    ):
        index, flag = types.int64, types.boolean
        sig = types.void(tile, index, index, index, x, index, index, index, flag, flag, out, index, index, index)

        def codegen(context, builder, sig, args):
            tile, tile_begin, tile_stride, sums_begin, x, x_begin, x_stride, n_inputs = args[:8]
            is_first, is_last, out, out_begin, out_stride, n_rows = args[8:]

            def row_pointers(array_type, array, begin, stride, count):
                offsets = [builder.add(begin, builder.mul(stride, _I64(row))) for row in range(count)]
                return [item_pointer(context, builder, array_type, array, offset, F32) for offset in offsets]

            weights = row_pointers(sig.args[0], tile, tile_begin, tile_stride, ROW_GROUP)
            unfinished = row_pointers(sig.args[0], tile, sums_begin, _I64(ROW_GROUP * N_LANES), n_tokens)
            tokens = row_pointers(sig.args[4], x, x_begin, x_stride, n_tokens)
            outputs = row_pointers(sig.args[10], out, out_begin, out_stride, n_tokens)

            n_whole = builder.and_(n_inputs, _I64(-N_LANES))
            sums = _begin_sums(builder, unfinished, is_first)
            sums = _multiply_vectors(builder, weights, tokens, sums, n_whole)
            sums = _multiply_last_vector(builder, weights, tokens, sums, n_whole, n_inputs)
            with builder.if_else(is_last) as (finish, leave):
                with finish:
                    _store_results(builder, sums, outputs, n_rows)
                with leave:
                    _leave_sums(builder, sums, unfinished)
            return context.get_dummy_value()

        return sig, codegen

    return tile_product


def _merge(builder, sums, others, sums_block, others_block):
    """Each of ``sums`` or ``others``, depending on which block was left last; both are indexed [token][row]."""
    merged = []
    for token_sums, token_others in zip(sums, others, strict=True):
        phis = [builder.phi(VECTOR_F32) for _ in token_sums]
        for phi, value, other in zip(phis, token_sums, token_others, strict=True):
            phi.add_incoming(value, sums_block)
            phi.add_incoming(other, others_block)
        merged.append(phis)
    return merged


def _begin_sums(builder, unfinished, is_first):
    before = builder.block
    resume = builder.append_basic_block("sums.resume")
    after = builder.append_basic_block("sums.begin")
    builder.cbranch(is_first, after, resume)

    builder.position_at_end(resume)
    offsets = [_I64(row * N_LANES) for row in range(ROW_GROUP)]
    resumed = [[_load_vector(builder, token, offset) for offset in offsets] for token in unfinished]
    builder.branch(after)

    builder.position_at_end(after)
    zeros = [[constant(VECTOR_F32, 0.0)] * ROW_GROUP for _ in unfinished]
    return _merge(builder, zeros, resumed, before, resume)


def _leave_sums(builder, sums, unfinished):
    for token_sums, token in zip(sums, unfinished, strict=True):
        for row, value in enumerate(token_sums):
            pointer = builder.gep(token, [_I64(row * N_LANES)])
            builder.store(value, builder.bitcast(pointer, VECTOR_F32.as_pointer()), align=4)


def _load_vector(builder, row, offset):
    return builder.load(builder.bitcast(builder.gep(row, [offset]), VECTOR_F32.as_pointer()), align=4)


def _accumulate(builder, weights, tokens, sums, weight_offset, token_offset):
    """One vector of every row times one vector of every token; ``sums`` is indexed [token][row]."""
    weight_vectors = [_load_vector(builder, row, weight_offset) for row in weights]
    result = []
    for row, token_sums in zip(tokens, sums, strict=True):
        token_vector = _load_vector(builder, row, token_offset)
        operands = zip(weight_vectors, token_sums, strict=True)
        result.append([call_llvm(builder, "llvm.fma.v16f32", VECTOR_F32, [w, token_vector, s]) for w, s in operands])
    return result


def _multiply_vectors(builder, weights, tokens, sums, n_whole):
    """The loop over the whole vectors of the inputs, of which there may be none."""
    before = builder.block
    loop = builder.append_basic_block("inputs")
    after = builder.append_basic_block("inputs.end")
    builder.cbranch(builder.icmp_signed(">", n_whole, _I64(0)), loop, after)

    builder.position_at_end(loop)
    offset = builder.phi(_I64)
    offset.add_incoming(_I64(0), before)
    loop_sums = [[builder.phi(VECTOR_F32) for _ in weights] for _ in tokens]
    next_sums = _accumulate(builder, weights, tokens, loop_sums, offset, offset)
    next_offset = builder.add(offset, _I64(N_LANES))
    offset.add_incoming(next_offset, loop)
    for phis, token_sums, token_next in zip(loop_sums, sums, next_sums, strict=True):
        for phi, value, next_value in zip(phis, token_sums, token_next, strict=True):
            phi.add_incoming(value, before)
            phi.add_incoming(next_value, loop)
    builder.cbranch(builder.icmp_signed("<", next_offset, n_whole), loop, after)

    builder.position_at_end(after)
    return _merge(builder, sums, next_sums, before, loop)


def _multiply_last_vector(builder, weights, tokens, sums, n_whole, n_inputs):
    """The inputs past the last whole vector, if any."""
    before = builder.block
    last = builder.append_basic_block("last")
    after = builder.append_basic_block("last.end")
    builder.cbranch(builder.icmp_signed("<", n_whole, n_inputs), last, after)

    builder.position_at_end(last)
    last_sums = _accumulate(builder, weights, tokens, sums, n_whole, builder.sub(n_inputs, _I64(N_LANES)))
    builder.branch(after)

    builder.position_at_end(after)
    return _merge(builder, sums, last_sums, before, last)


def _sum_lanes_of_each(builder, vectors):
    """One vector whose lane i is the sum of the lanes of ``vectors[i]``; their count is a power of two up to 16.

    Each round halves every vector's lanes and packs two vectors into one, so that 4 vectors cost 13
    instructions. The tree is (i, i+8), (i, i+4), (i, i+2), (i, i+1), as in ``simd.sum_lanes``.
    """
    count = len(vectors)
    width = N_LANES
    while width > 1:
        half = width // 2
        partner = vectors[1::2] if len(vectors) > 1 else [vectors[0]]
        both = len(vectors) > 1
        begins = range(0, 2 * N_LANES if both else count * width, width)
        low = [begin + lane for begin in begins for lane in range(half)]
        high = [lane + half for lane in low]
        vectors = [
            builder.fadd(_shuffle_pair(builder, a, b, low), _shuffle_pair(builder, a, b, high))
            for a, b in zip(vectors[::2], partner, strict=True)
        ]
        width = half
    return vectors[0]


def _shuffle_pair(builder, a, b, lanes):
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def _store_results(builder, sums, outputs, n_rows):
    """Write ``n_rows`` results to each token's output row."""
    results = [_sum_lanes_of_each(builder, token_sums) for token_sums in sums]
    is_whole = builder.icmp_signed(">=", n_rows, _I64(ROW_GROUP))
    with builder.if_else(is_whole, likely=True) as (whole, partial):
        with whole:
            for result, output in zip(results, outputs, strict=True):
                builder.store(result, builder.bitcast(output, result.type.as_pointer()), align=4)
        with partial:
            for lane in range(ROW_GROUP - 1):
                with cgutils.if_likely(builder, builder.icmp_signed(">", n_rows, _I64(lane))):
                    for result, output in zip(results, outputs, strict=True):
                        builder.store(
                            builder.extract_element(result, I32(lane)), builder.gep(output, [_I64(lane)]), align=4
                        )
