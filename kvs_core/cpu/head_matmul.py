"""A product for each head with a matrix of its own: how latent attention goes to its cache and back.

The product itself is that of experts, each head being one that every token takes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvs_core.cpu import expert_kernels as kernels
from kvs_core.cpu.arguments import FLOAT32, check_array
from kvs_core.cpu.matmul import CpuScratch, check_scratch
from kvs_core.cpu.weights import CpuWeight
from kvs_core.errors import KernelArgumentError

Floats = NDArray[np.float32]


def matmul_heads(
    weight: CpuWeight, x: Floats, out: Floats, inputs: Floats, outputs: Floats, scratch: CpuScratch
) -> None:
    """``out = [weight of the head @ first n_in elements | the others as they are]`` for each head of each row.

    weight            [n_head * n_out, n_in], head after head
    x                 [n_tokens, n_head, n_in or more]
    out               [n_tokens, n_head, n_out and what is left over of x]
    inputs, outputs   overwritten; room for ``n_tokens * n_head`` rows of n_in and of n_out
    Bits              of a row are those of the row alone.
    Raises            KernelArgumentError
    """
    n_tokens, n_head, width = x.shape
    n_in, n_out = weight.n_in, weight.n_out // n_head
    if weight.n_out % n_head or width < n_in:
        raise KernelArgumentError(f"a weight of {weight.n_out} rows, {n_in} columns for {n_head} heads of {width}")
    check_array("x", x, FLOAT32, x.shape)
    check_array("out", out, FLOAT32, (n_tokens, n_head, n_out + width - n_in))
    check_scratch(n_in, scratch)
    n_rows = n_tokens * n_head
    if inputs.size < n_rows * n_in or outputs.size < n_rows * n_out:
        raise KernelArgumentError(f"room for {inputs.size} and {outputs.size} floats; {n_rows} rows do not fit")
    by_head = inputs[: n_rows * n_in].reshape(n_head, n_tokens, n_in)
    products = outputs[: n_rows * n_out].reshape(n_head, n_tokens, n_out)
    by_head[:] = x[:, :, :n_in].transpose(1, 0, 2)
    kernels.expert_matmul_kernel(
        weight.kind,
        weight.data,
        weight.data,
        1,
        n_head,
        np.arange(n_head, dtype=np.int32),
        np.arange(n_head + 1, dtype=np.int32) * np.int32(n_tokens),
        by_head.reshape(n_rows, n_in),
        products.reshape(n_rows, n_out),
        products.reshape(n_rows, n_out),
        scratch.buffer,
        scratch.team.control,
        scratch.team.n_threads,
    )
    out[:, :, :n_out] = products.transpose(1, 0, 2)
    out[:, :, n_out:] = x[:, :, n_in:]
