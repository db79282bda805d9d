"""Names of devices, and which of the visible GPUs they mean."""

from __future__ import annotations

import pytest

from kvs_core.devices import VisibleGpu, explain_no_driver, find_device_problem, find_gpu, parse_device
from kvs_core.errors import BackendUnavailableError, UnsupportedError

GPUS = (
    VisibleGpu(name="Some Card", uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
    VisibleGpu(name="Other Card", uuid="GPU-8932aaaa-d72c-4106-c12f-20bd9faed9f6"),
)


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("cuda", 0),
        ("cuda:0", 0),
        ("cuda:1", 1),
        ("cuda:GPU-8932f", 0),
        ("cuda:gpu-8932AAAA", 1),
        ("cuda:GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 0),
    ],
)
def test_a_number_or_the_start_of_a_uuid_means_one_gpu(text: str, index: int) -> None:
    assert find_device_problem(text) is None
    assert find_gpu(parse_device(text), GPUS) == index


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cuda:2", "cuda:2 is not a device of this machine"),
        ("cuda:GPU-1", "cuda:GPU-1 is not a device of this machine"),
        ("cuda:GPU-8932", "cuda:GPU-8932 begins the UUID of 2 devices"),
    ],
)
def test_a_gpu_that_is_not_here_or_not_one_is_refused_with_those_that_are(text: str, reason: str) -> None:
    with pytest.raises(BackendUnavailableError, match=reason) as caught:
        find_gpu(parse_device(text), GPUS)
    for index, gpu in enumerate(GPUS):
        assert f"cuda:{index} is {gpu.name}, {gpu.uuid}" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value.hint)


def test_without_a_driver_the_variable_that_hides_devices_is_named_where_it_is_set() -> None:
    assert explain_no_driver({}).startswith("see what nvidia-smi says")
    for value in ("", "-1", "MIG-12ab"):
        assert explain_no_driver({"CUDA_VISIBLE_DEVICES": value}).startswith(f"CUDA_VISIBLE_DEVICES={value} may hide")


def test_without_any_gpu_the_message_says_so() -> None:
    with pytest.raises(BackendUnavailableError, match="there is none"):
        find_gpu(parse_device("cuda"), ())


@pytest.mark.parametrize(
    "text", ["", "gpu", "cpu:0", "cuda:", "cuda:-1", "cuda:GPU-", "cuda:GPU-xyz", "cuda:1.5", "auto:1"]
)
def test_other_texts_name_no_device(text: str) -> None:
    with pytest.raises(UnsupportedError, match="not a device; allowed: auto, cpu"):
        parse_device(text)


def test_a_mig_instance_is_refused_with_the_way_to_it() -> None:
    for text in ("cuda:MIG-12ab", "MIG-12ab"):
        with pytest.raises(
            UnsupportedError, match="a MIG instance, which is chosen with CUDA_VISIBLE_DEVICES=MIG-12ab "
        ):
            parse_device(text)


@pytest.mark.parametrize(("text", "meant"), [("CUDA:1", "cuda:1"), ("Auto", "auto"), ("GPU-12ab", "cuda:GPU-12ab")])
def test_a_device_that_is_nearly_named_is_told_how_to_write_it(text: str, meant: str) -> None:
    with pytest.raises(UnsupportedError, match=f"not a device; write {meant}"):
        parse_device(text)
