"""Both backends against the protocol that model files are written in: every operation, and the same arguments."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from cuda_kernels.operations import CudaOperations
from kvs_core.cpu.operations import CpuOperations
from kvs_core.operations import Operations

NAMES = [name for name in vars(Operations) if not name.startswith("_")]


def parameters(owner: type, name: str) -> list[tuple[str, object, object]]:
    """Name, kind and default of each; a property has none."""
    member = inspect.getattr_static(owner, name)
    if isinstance(member, property):
        return []
    return [(one.name, one.kind, one.default) for one in inspect.signature(member).parameters.values()]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("owner", [CpuOperations, CudaOperations])
def test_a_backend_has_every_operation_with_the_arguments_of_the_protocol(owner: type, name: str) -> None:
    assert isinstance(inspect.getattr_static(owner, name), property) is isinstance(vars(Operations)[name], property)
    assert parameters(owner, name) == parameters(Operations, name)
