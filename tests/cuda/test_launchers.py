"""Launchers refuse what their kernels do not take, before anything reaches a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType

from cuda_kernels import attention_decode as attention_decode_module
from cuda_kernels.attention_decode import attention_decode
from cuda_kernels.attention_prefill import PrefillShape, attention_prefill, count_state_floats
from cuda_kernels.head_matvec import head_matvec, take_heads
from cuda_kernels.launch import SHARED_LIMIT, Kernel, check_array, overlapped_launches
from cuda_kernels.matvec import Product, matvec
from cuda_kernels.merge import merge_partials, state_floats
from cuda_kernels.norm import rms_norm
from cuda_kernels.page_copy import copy_pages
from cuda_kernels.sampling_reduce import top_k
from cuda_kernels.store import store_rows
from cuda_kernels.weights import FAST_TYPES, WeightGeometry, lay_out
from kvs_core.cuda_scratch import LARGE_BEGIN
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_types import KvType, PageGeometry


@dataclass(frozen=True)
class DeviceStub:
    """Looks like a device array to the checks; no memory behind it."""

    shape: tuple[int, ...]
    scalar: Any = np.float32
    is_contiguous: bool = True
    __cuda_ndarray__ = True

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.scalar)

    @property
    def strides(self) -> tuple[int, ...]:
        return (0,) * len(self.shape)

    def is_c_contiguous(self) -> bool:
        return self.is_contiguous


PAGE = PageGeometry(page_tokens=256, n_head_kv=2, head_dim_k=64, head_dim_v=64, type_k=KvType.F16, type_v=KvType.F16)
STREAM = 0


def decode_arguments() -> dict[str, Any]:
    return {
        "q": DeviceStub((1, 8, 64)),
        "pages": DeviceStub((4,), np.int64),
        "positions": DeviceStub((1,), np.int32),
        "partials": DeviceStub((3, 1, 8, 64)),
        "max_sum": DeviceStub((3, 1, 8, 2)),
        "page": PAGE,
        "first_partition": 0,
        "scale": 0.125,
        "stream": STREAM,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 8, 64), np.float32)}, "q: ndarray is not in device memory"),
        ({"q": DeviceStub((1, 8, 64), np.float16)}, "q: dtype float16, needs float32"),
        ({"q": DeviceStub((1, 8, 128))}, r"q: shape \[1, 8, 128\], needs \[any, any, 64\]"),
        ({"q": DeviceStub((1, 8, 64), is_contiguous=False)}, "needs C order"),
        ({"positions": DeviceStub((2,), np.int32)}, "positions: shape"),
        ({"first_partition": 2}, "the last partition starts in page 4, the table has 4"),
        ({"page": replace(PAGE, page_tokens=48)}, "pages of 48 tokens, needs a multiple of 64"),
        ({"page": replace(PAGE, n_head_kv=3)}, "8 heads over 3 K/V heads"),
    ],
)
def test_decode_attention_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        attention_decode(**{**decode_arguments(), **change})


def test_decode_attention_refuses_a_head_size_its_type_cannot_hold() -> None:
    page = replace(PAGE, head_dim_k=80, head_dim_v=80, type_v=KvType.Q8_0)
    arguments = decode_arguments() | {"page": page, "q": DeviceStub((1, 8, 80)), "partials": DeviceStub((3, 1, 8, 80))}
    with pytest.raises(KernelArgumentError, match="head size 80 with q8_0"):
        attention_decode(**arguments)


def test_decode_attention_refuses_nine_tokens() -> None:
    arguments = decode_arguments() | {
        "q": DeviceStub((9, 8, 64)),
        "positions": DeviceStub((9,), np.int32),
        "partials": DeviceStub((3, 9, 8, 64)),
        "max_sum": DeviceStub((3, 9, 8, 2)),
    }
    with pytest.raises(KernelArgumentError, match="9 tokens, needs 1 to 8"):
        attention_decode(**arguments)


@pytest.mark.parametrize(
    ("n_partitions", "is_early"),
    [(1, True), (132, True), (133, False), (512, False)],
)
def test_decode_attention_starts_early_only_where_all_its_blocks_have_places(
    n_partitions: int, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_decode_module, "device_multiprocessors", lambda: 132)
    monkeypatch.setattr(attention_decode_module, "address_of", lambda _: 0)
    page = replace(PAGE, type_k=KvType.F16, type_v=KvType.F16)  # two blocks a multiprocessor, two KV heads
    launched: list[bool] = []
    monkeypatch.setattr(Kernel, "launch", lambda *_, may_overlap: launched.append(may_overlap))
    arguments = decode_arguments() | {
        "page": page,
        "pages": DeviceStub((4096,), np.int64),
        "partials": DeviceStub((n_partitions, 1, 8, 64)),
        "max_sum": DeviceStub((n_partitions, 1, 8, 2)),
    }
    attention_decode(**arguments)
    assert launched == [is_early]


class ParametersStub:
    """In place of a loaded kernel's parameters: remembers which launches start early."""

    def __init__(self) -> None:
        self.early: list[bool] = []

    def launch(self, *arguments: Any) -> None:
        self.early.append(arguments[-1])


def test_a_launch_starts_early_where_its_kernel_its_step_and_it_itself_allow_that() -> None:
    for kernel_may in (False, True):
        kernel = Kernel(lambda: None, (), n_threads=32, overlaps=kernel_may)
        kernel._packed = stub = ParametersStub()
        for step_may in (False, True):
            with overlapped_launches(supported=step_may):
                kernel.launch((1,), 0, may_overlap=False)
                kernel.launch((1,), 0)
        kernel.launch((1,), 0)
        assert stub.early == [False, False, False, kernel_may, False]


@pytest.mark.parametrize(
    ("span", "message"),
    [
        ({"key_begin": 0, "key_end": 300, "is_last": False}, "span 0 to 300 of 400 keys"),
        ({"key_begin": 100, "key_end": 400, "is_last": True}, "span 100 to 400"),
        ({"key_begin": 256, "key_end": 399, "is_last": True}, "span 256 to 399"),
        ({"key_begin": 256, "key_end": 256, "is_last": False}, "span 256 to 256"),
    ],
)
def test_prefill_attention_refuses_spans_off_page_boundaries(span: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        attention_prefill(
            DeviceStub((100, 8, 64)),
            DeviceStub((2,), np.int64),
            DeviceStub((count_state_floats(PAGE, 100, 4),)),
            DeviceStub((100, 8, 64)),
            page=PAGE,
            first_position=300,
            is_first=True,
            scale=0.125,
            stream=STREAM,
            **span,
        )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_prefill_tiles_fit_a_consumer_card(head_dim: int) -> None:
    for type_k in KvType:
        for type_v in KvType:
            page = replace(PAGE, head_dim_k=head_dim, head_dim_v=head_dim, type_k=type_k, type_v=type_v)
            assert PrefillShape(page=page).shared_bytes <= SHARED_LIMIT


def test_a_kernel_that_needs_more_shared_memory_than_a_consumer_card_has_is_refused() -> None:
    with pytest.raises(KernelArgumentError, match="101377 bytes of shared memory, its devices have 101376"):
        Kernel(lambda: None, (), n_threads=32, dynamic_bytes=SHARED_LIMIT + 1)


def test_merge_refuses_a_state_of_another_size() -> None:
    with pytest.raises(KernelArgumentError, match="state: shape"):
        merge_partials(
            DeviceStub((3, 1, 8, 64)),
            DeviceStub((3, 1, 8, 2)),
            DeviceStub((1,), np.int32),
            DeviceStub((state_floats(8, 64) + 1,)),
            DeviceStub((1, 8, 64)),
            n_head=8,
            head_dim=64,
            first_partition=0,
            large_begin=LARGE_BEGIN,
            is_first=True,
            is_last=True,
            stream=STREAM,
        )


def test_matvec_refuses_float_vectors_for_quantised_weights() -> None:
    geometry = WeightGeometry(weight_type=GGMLQuantizationType.Q4_K, n_rows=4, n_cols=256)
    product = Product(matrix=DeviceStub((geometry.n_bytes,), np.uint8), geometry=geometry, out=DeviceStub((1, 4)))
    with pytest.raises(KernelArgumentError, match="vectors: dtype float32, needs int8"):
        matvec([product], DeviceStub((1, 256)), None, is_added=False, stream=STREAM)


@pytest.mark.parametrize("weight_type", FAST_TYPES, ids=lambda weight_type: weight_type.name)
def test_the_device_layout_has_the_bytes_of_the_file(weight_type: GGMLQuantizationType) -> None:
    geometry = WeightGeometry(weight_type=weight_type, n_rows=256, n_cols=512)
    assert geometry.n_bytes == geometry.n_rows * geometry.row_blocks * geometry.block_bytes
    assert all(offset % 256 == 0 for offset in geometry.plane_offsets)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    geometry = WeightGeometry(weight_type=GGMLQuantizationType.Q6_K, n_rows=4, n_cols=320)
    with pytest.raises(KernelArgumentError, match="rows of 320 weights of type Q6_K, needs a multiple of 256"):
        geometry.check()
    with pytest.raises(KernelArgumentError, match="type Q8_K have no kernel"):
        replace(geometry, weight_type=GGMLQuantizationType.Q8_K).check()


def test_splitting_a_part_of_a_row_is_refused() -> None:
    geometry = WeightGeometry(weight_type=GGMLQuantizationType.Q8_0, n_rows=4, n_cols=64)
    matrix = DeviceStub((geometry.n_bytes // 2,), np.uint16)
    with pytest.raises(KernelArgumentError, match="needs whole rows of 68 bytes"):
        lay_out(DeviceStub((35,), np.uint16), matrix, geometry=geometry, first_row=0, stream=STREAM)


def test_small_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(KernelArgumentError, match=r"eps 0.0"):
        rms_norm(DeviceStub((1, 8)), DeviceStub((8,)), DeviceStub((1, 8)), eps=0.0, stream=STREAM)
    with pytest.raises(KernelArgumentError, match="k 9, needs 1 to 8"):
        top_k(DeviceStub((1, 8)), DeviceStub((1, 9)), DeviceStub((1, 9), np.int32), stream=STREAM)
    table = DeviceStub((1,), np.int64)
    with pytest.raises(KernelArgumentError, match="100 bytes"):
        copy_pages(table, table, page_bytes=100, blocks_per_page=1, stream=STREAM)
    page = replace(PAGE, head_dim_k=80, type_k=KvType.Q8_0)
    with pytest.raises(KernelArgumentError, match="head size 80 with q8_0"):
        store_rows(
            DeviceStub((1, 2, 80)),
            DeviceStub((1, 2, 64)),
            table,
            DeviceStub((1,), np.int32),
            page=page,
            stream=STREAM,
        )


LATENT = PageGeometry(
    page_tokens=256, n_head_kv=1, head_dim_k=576, head_dim_v=512, type_k=KvType.F16, type_v=KvType.F16, v_in_k=True
)


@pytest.mark.parametrize(
    ("n_head", "change", "message"),
    [
        (16, {"window": 100}, "no window, no soft cap and no sinks"),
        (16, {"softcap": 30.0}, "no window, no soft cap and no sinks"),
        (129, {}, "129 heads over a latent cache: CUDA attention has up to 128"),
        (16, {"page": replace(LATENT, head_dim_k=544)}, "head size 544 with f16"),
        (16, {"page": replace(LATENT, head_dim_k=640)}, "latent rows of 640 with 512 values"),
    ],
)
def test_decode_attention_over_a_latent_cache_refuses(n_head: int, change: dict[str, Any], message: str) -> None:
    page = change.get("page", LATENT)
    arguments = decode_arguments() | {
        "q": DeviceStub((1, n_head, page.head_dim_k)),
        "partials": DeviceStub((3, 1, n_head, page.head_dim_v)),
        "max_sum": DeviceStub((3, 1, n_head, 2)),
        "page": page,
    }
    with pytest.raises(KernelArgumentError, match=message):
        attention_decode(**arguments | change)


@pytest.mark.parametrize(("page", "v"), [(PAGE, None), (LATENT, DeviceStub((1, 1, 512)))], ids=["missing", "given"])
def test_a_store_wants_values_where_the_page_has_a_place_for_them(page: PageGeometry, v: Any) -> None:
    k, table = DeviceStub((1, page.n_head_kv, page.head_dim_k)), DeviceStub((4,), np.int64)
    with pytest.raises(KernelArgumentError, match="for such pages"):
        store_rows(k, v, table, DeviceStub((1,), np.int32), page=page, stream=STREAM)


@pytest.mark.parametrize(
    ("inputs", "n_in", "message"),
    [
        (DeviceStub((4, 2, 48), np.int8), 48, "48 of 96 elements as int8"),
        (DeviceStub((4, 2, 128)), 128, "128 of 96 elements"),
        (DeviceStub((2, 4, 64)), 64, "inputs: shape"),
    ],
)
def test_the_inputs_of_heads_are_refused_if_they_do_not_fit(inputs: Any, n_in: int, message: str) -> None:
    with pytest.raises(KernelArgumentError, match=message):
        take_heads(
            DeviceStub((2, 4, 96)), inputs, None, DeviceStub((2, 4, 160)), n_in=n_in, n_out=64 + n_in, stream=STREAM
        )


@pytest.mark.parametrize(("n_tokens", "n_head"), [(9, 4), (2, 5)])
def test_products_of_heads_refuse_many_tokens_and_parts_of_matrices(n_tokens: int, n_head: int) -> None:
    geometry = WeightGeometry(weight_type=GGMLQuantizationType.F32, n_rows=256, n_cols=64)
    matrix = DeviceStub((geometry.n_bytes,), np.uint8)
    inputs, out = DeviceStub((n_head, n_tokens, 64)), DeviceStub((n_tokens, n_head, 64))
    with pytest.raises(KernelArgumentError, match="256 rows for"):
        head_matvec(matrix, inputs, None, out, geometry=geometry, stream=STREAM)


def test_check_array_accepts_what_it_asks_for() -> None:
    check_array("x", DeviceStub((2, 3)), np.float32, (2, None))
