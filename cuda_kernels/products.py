"""Products of float16 or float32 matrices with float32 results by cuBLASLt; the shape fixes algorithm and workspace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from nvmath import CudaDataType
from nvmath.bindings import cublas, cublasLt

from cuda_kernels.activation import HALF_GROWTH
from kvs_core.errors import BackendError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Descriptors of one shape and the algorithm chosen for it."""

    weights: Any
    inputs: Any
    outputs: Any
    heuristic: Any
    algorithm: int


class LtProducts:
    """``out[:, columns] = x @ w^T`` for row-major float16 ``x`` and ``w``.

    The library is asked once per shape, always with the same workspace size and address alignment, so that the
    algorithm, and with it every bit, depends on the shape alone.
    """

    def __init__(self, workspace_bytes: int) -> None:
        self._workspace_bytes = workspace_bytes
        self._handle = cublasLt.create()
        self._compute = cublasLt.matmul_desc_create(int(cublas.ComputeType.COMPUTE_32F), int(CudaDataType.CUDA_R_32F))
        self._set_transposed()
        self._preference = cublasLt.matmul_preference_create()
        limit = np.array([workspace_bytes], dtype=np.uint64)
        attribute = cublasLt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
        cublasLt.matmul_preference_set_attribute(self._preference, int(attribute), limit.ctypes.data, limit.nbytes)
        self._one = np.array([1.0], dtype=np.float32)
        self._growth = np.array([HALF_GROWTH], dtype=np.float32)
        self._zero = np.array([0.0], dtype=np.float32)
        self._products: dict[tuple[int, int, int, int, bool, int, int], _Product] = {}

    def multiply(
        self,
        *,
        weights: int,
        inputs: int,
        out: int,
        n_rows: int,
        n_tokens: int,
        n_in: int,
        out_stride: int,
        workspace: int,
        stream: int,
        is_added: bool = False,
        is_single: bool = False,
        is_shrunk: bool = False,
        n_heads: int = 1,
        head_stride: int = 0,
    ) -> None:
        """Device addresses of float16 [n_rows, n_in], float16 [n_tokens, n_in] and float32 [n_tokens, out_stride].

        ``is_added``: to what ``out`` holds. The algorithm is the same. ``is_single``: operands are float32 throughout.
        ``is_shrunk``: inputs are HALF_SHRINK times what they stand for.
        ``n_heads``: as many products, weights and inputs one behind the other, results ``head_stride`` columns apart.
        Raises   BackendError when the library has no algorithm.
        """
        product = self._product(n_rows, n_tokens, n_in, out_stride, is_single, n_heads, head_stride)
        cublasLt.matmul(
            self._handle,
            self._compute,
            (self._growth if is_shrunk else self._one).ctypes.data,
            weights,
            product.weights,
            inputs,
            product.inputs,
            (self._one if is_added else self._zero).ctypes.data,
            out,
            product.outputs,
            out,
            product.outputs,
            product.algorithm,
            workspace,
            self._workspace_bytes,
            stream,
        )

    def close(self) -> None:
        for product in self._products.values():
            for layout in (product.weights, product.inputs, product.outputs):
                cublasLt.matrix_layout_destroy(layout)
        self._products.clear()
        cublasLt.matmul_preference_destroy(self._preference)
        cublasLt.matmul_desc_destroy(self._compute)
        cublasLt.destroy(self._handle)

    def _set_transposed(self) -> None:
        """The library counts columns first: row-major weights are its transposed matrix."""
        attribute = cublasLt.MatmulDescAttribute.TRANSA
        value = np.array([1], dtype=cublasLt.get_matmul_desc_attribute_dtype(int(attribute)))
        cublasLt.matmul_desc_set_attribute(self._compute, int(attribute), value.ctypes.data, value.nbytes)

    @staticmethod
    def _set_batch(layout: Any, n: int, stride: int) -> None:
        """A layout stands for ``n`` matrices, ``stride`` elements apart."""
        attributes = cublasLt.MatrixLayoutAttribute
        for attribute, value in ((attributes.BATCH_COUNT, n), (attributes.STRIDED_BATCH_OFFSET, stride)):
            dtype = cublasLt.get_matrix_layout_attribute_dtype(int(attribute))
            number = np.array([value], dtype=dtype)
            cublasLt.matrix_layout_set_attribute(layout, int(attribute), number.ctypes.data, number.nbytes)

    def _product(
        self,
        n_rows: int,
        n_tokens: int,
        n_in: int,
        out_stride: int,
        is_single: bool,
        n_heads: int,
        head_stride: int,
    ) -> _Product:
        key = (n_rows, n_tokens, n_in, out_stride, is_single, n_heads, head_stride)
        found = self._products.get(key)
        if found is not None:
            return found
        single = int(CudaDataType.CUDA_R_32F)
        operand = single if is_single else int(CudaDataType.CUDA_R_16F)
        weights = cublasLt.matrix_layout_create(operand, n_in, n_rows, n_in)
        inputs = cublasLt.matrix_layout_create(operand, n_in, n_tokens, n_in)
        outputs = cublasLt.matrix_layout_create(single, n_rows, n_tokens, out_stride)
        if n_heads > 1:
            for layout, stride in ((weights, n_rows * n_in), (inputs, n_tokens * n_in), (outputs, head_stride)):
                self._set_batch(layout, n_heads, stride)
        heuristic = np.zeros(1, dtype=cublasLt.matmul_heuristic_result_dtype)
        count = np.zeros(1, dtype=np.int32)
        cublasLt.matmul_algo_get_heuristic(
            self._handle,
            self._compute,
            weights,
            inputs,
            outputs,
            outputs,
            self._preference,
            1,
            heuristic.ctypes.data,
            count.ctypes.data,
        )
        if count[0] < 1:
            raise BackendError(f"cuBLASLt has no algorithm for {n_rows} x {n_tokens} x {n_in}")
        product = _Product(
            weights=weights,
            inputs=inputs,
            outputs=outputs,
            heuristic=heuristic,
            algorithm=int(heuristic["algo"].ctypes.data),
        )
        self._products[key] = product
        return product
