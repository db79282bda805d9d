"""Attention over a latent cache: one K/V head whose values are the first part of its keys, in pages without V."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvs_core.attention_rule import AttentionRule
from kvs_core.cpu.store import store_kv
from kvs_core.cpu.threads import ThreadTeam
from kvs_core.errors import KernelArgumentError
from kvs_core.kv_rotation import HeadRotations, Rotation, choose_rotations
from kvs_core.kv_types import KvType
from tests.kernels.attention_runs import KERNELS, SEED, assert_close, assert_same_bits, random_queries, run
from tests.kernels.paged_cache import empty_pages, geometry_of, random_cache, random_rows


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    team = ThreadTeam(2)
    yield team
    team.close()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("kv_type", KvType)
def test_every_type_at_the_size_of_deepseek(kernel: str, kv_type: KvType, team: ThreadTeam) -> None:
    """Keys of 576, values their first 512, sixteen query heads."""
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(n_head_kv=1, head_dim_k=576, head_dim_v=512, type_k=kv_type.value, v_in_k=True)
    cache = random_cache(rng, geometry, 75)
    q = random_queries(rng, cache, 3, 16)
    rule = AttentionRule(scale=1.0 / 24.0)
    assert_close(run(kernel, cache, q, team, first_pos=72, rule=rule), cache, q, first_pos=72, rule=rule)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("head_dim_k", "head_dim_v"), [(48, 32), (112, 96), (64, 64)])
def test_spans_change_no_bit_at_other_sizes(kernel: str, head_dim_k: int, head_dim_v: int, team: ThreadTeam) -> None:
    rng = np.random.default_rng(SEED)
    geometry = geometry_of(n_head_kv=1, head_dim_k=head_dim_k, head_dim_v=head_dim_v, type_k="f32", v_in_k=True)
    cache = random_cache(rng, geometry, 150)
    q = random_queries(rng, cache, 5, 6)
    whole = run(kernel, cache, q, team, first_pos=145)
    assert_close(whole, cache, q, first_pos=145)
    assert_same_bits(run(kernel, cache, q, team, first_pos=145, spans=[0, 1, 3, 5]), whole)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_1", "turbo3"])
def test_a_page_holds_keys_alone(kv_type: str) -> None:
    latent = geometry_of(n_head_kv=1, head_dim_k=576, head_dim_v=512, type_k=kv_type, v_in_k=True)
    assert latent.payload_bytes == latent.k_region.n_bytes
    assert replace(latent, v_in_k=False).payload_bytes == latent.payload_bytes + latent.v_region.n_bytes


def test_rows_with_values_are_refused_and_so_are_pages_that_need_them_without() -> None:
    rng = np.random.default_rng(SEED)
    latent = geometry_of(n_head_kv=1, v_in_k=True)
    arena, offsets = empty_pages(rng, latent, 2)
    k, _ = random_rows(rng, latent, 3)
    before = arena.copy()
    with pytest.raises(KernelArgumentError, match="values are given"):
        store_kv(arena, latent, offsets, 0, k, k)
    with pytest.raises(KernelArgumentError, match="values are given"):
        store_kv(arena, replace(latent, v_in_k=False), offsets, 0, k, None)
    with pytest.raises(KernelArgumentError, match="cannot be the first part"):
        store_kv(arena, replace(latent, type_v=KvType.F32), offsets, 0, k, None)
    assert (arena == before).all()


@pytest.mark.parametrize(
    ("kv_type", "head_dim_v", "rotation"),
    [
        ("f16", 512, None),
        ("q8_0", 512, Rotation(size=64)),
        ("q4_0", 96, None),
        ("turbo4", 512, Rotation(size=64, is_signed=True)),
    ],
)
def test_values_are_rotated_with_their_keys(kv_type: str, head_dim_v: int, rotation: Rotation | None) -> None:
    """One matrix for both, so one that divides both sizes; 96 leaves no run of 64 whole."""
    geometry = geometry_of(n_head_kv=1, head_dim_k=576, head_dim_v=head_dim_v, type_k=kv_type, v_in_k=True)
    wanted = None if rotation is None else HeadRotations(keys=rotation, values=rotation)
    assert choose_rotations(geometry, plain_types=True) == wanted
