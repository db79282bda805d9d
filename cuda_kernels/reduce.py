"""Reductions over one block in a fixed order, for kernels whose rows are a block wide. No kernels.

The simulator has no warp shuffles; there the same tree runs over shared memory.
"""

from __future__ import annotations

from numba import cuda

from cuda_kernels.intrinsics import FULL_WARP
from cuda_kernels.launch import IN_SIMULATOR, device_function

BLOCK_THREADS = 256
N_WARPS = BLOCK_THREADS // 32

if IN_SIMULATOR:

    @device_function
    def block_sum(value, scratch):
        """Sum over the block, the same in every thread; ``scratch``: shared float32 [BLOCK_THREADS]."""
        tid = cuda.threadIdx.x
        scratch[tid] = value
        cuda.syncthreads()
        for step in (16, 8, 4, 2, 1):
            other = scratch[tid ^ step]
            cuda.syncthreads()
            scratch[tid] += other
            cuda.syncthreads()
        total = scratch[0]
        for w in range(1, N_WARPS):
            total += scratch[32 * w]
        cuda.syncthreads()
        return total

    @device_function
    def block_max(value, scratch):
        """Maximum over the block, the same in every thread; ``scratch``: shared float32 [BLOCK_THREADS]."""
        scratch[cuda.threadIdx.x] = value
        cuda.syncthreads()
        largest = scratch[0]
        for i in range(1, BLOCK_THREADS):
            largest = max(largest, scratch[i])
        cuda.syncthreads()
        return largest

else:

    @device_function
    def block_sum(value, scratch):
        """Sum over the block, the same in every thread; ``scratch``: shared float32 [BLOCK_THREADS]."""
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(FULL_WARP, value, step)
        if cuda.threadIdx.x & 31 == 0:
            scratch[cuda.threadIdx.x >> 5] = value
        cuda.syncthreads()
        total = scratch[0]
        for w in range(1, N_WARPS):
            total += scratch[w]
        cuda.syncthreads()
        return total

    @device_function
    def block_max(value, scratch):
        """Maximum over the block, the same in every thread; ``scratch``: shared float32 [BLOCK_THREADS]."""
        for step in (16, 8, 4, 2, 1):
            value = max(value, cuda.shfl_xor_sync(FULL_WARP, value, step))
        if cuda.threadIdx.x & 31 == 0:
            scratch[cuda.threadIdx.x >> 5] = value
        cuda.syncthreads()
        largest = scratch[0]
        for w in range(1, N_WARPS):
            largest = max(largest, scratch[w])
        cuda.syncthreads()
        return largest
