"""Kernels kept between starts: what their names depend on, and that a second start compiles none of them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib import import_module
from inspect import getmembers
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest

pytest.importorskip("numba_cuda", reason="the extra 'cuda' is not installed")
pytest.importorskip("nvmath", reason="the extra 'cuda' is not installed")

from gguf import GGMLQuantizationType as Q

import cuda_kernels
from cuda_kernels import cubin, elementwise, launch, matvec
from cuda_kernels.backend import CudaBackend
from cuda_kernels.cubin import Cubin, compile_cubin, file_name, target_of
from cuda_kernels.launch import Kernel, keep_kernels
from kvs_core.config import RunConfig
from kvs_core.devices import DeviceName
from kvs_core.kernel_files import KernelFiles
from kvs_core.kv_types import KvType
from kvs_core.model_file import open_model
from kvs_core.model_reader import read_model_shape
from kvs_core.plan import plan_run
from kvs_core.session import Session
from scripts.cuda_checks.other_generation import take_kernels_of
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.kernel_list import decode_entries, every_entry, other_entries, recurrent_entries
from tests.fixtures.tiny_architectures import tiny_architectures
from tests.fixtures.tiny_hybrid_models import tiny_hybrid_models
from tests.fixtures.tiny_latent_models import tiny_latent_models
from tests.fixtures.tiny_models import TinyModel, write_model
from tests.fixtures.tiny_window_models import tiny_window_models, without_window

_WINDOWED = {name: replace(model, n_ctx_train=1024) for name, model in tiny_window_models(head_dims=(64, 128)).items()}
_LATENT = {name: replace(model, n_ctx_train=1024) for name, model in tiny_latent_models(q_rank=96).items()}
_WIDE_NORMS = {f"{name}.weight": (256,) for name in ("post_attention_norm", "post_ffw_norm")}
MODELS = {
    "f32": TinyModel(),
    "biases, tied": TinyModel(weight_type=Q.F16, biases=True, tied=True),
    "quantised": TinyModel(weight_type=Q.Q8_0, tensor_types={"token_embd.weight": Q.Q6_K, "output.weight": Q.Q4_K}),
    "streamed": TinyModel(weight_type=Q.Q4_K, n_embd=256, n_ff=512),
    **{
        name: replace(tiny_architectures()[name], n_ctx_train=1024)
        for name in ("mistral3", "qwen2", "qwen3", "mixtral", "qwen2moe")
    },
    "qwen3moe, quantised": replace(tiny_architectures()["qwen3moe"], n_ctx_train=1024, weight_type=Q.Q4_0),
    "qwen35": replace(tiny_hybrid_models()["qwen35"], n_ctx_train=1024),
    **_WINDOWED,
    "gemma4, wide": replace(tiny_window_models(head_dims=(64, 512))["gemma4"], n_ctx_train=1024),
    **{name: _LATENT[name] for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3")},
    "deepseek-v3, quantised": replace(_LATENT["deepseek-v3"], weight_type=Q.Q8_0),
    "gemma3, quantised": replace(without_window(_WINDOWED["gemma3"]), weight_type=Q.Q8_0),
    "gemma3, streamed": replace(
        _WINDOWED["gemma3"],
        weight_type=Q.Q4_K,
        n_embd=256,
        n_ff=512,
        extra_tensors=_WINDOWED["gemma3"].extra_tensors | _WIDE_NORMS,
    ),
    "laguna, quantised": replace(without_window(_WINDOWED["laguna-m"]), weight_type=Q.Q8_0),
    "gpt-oss, quantised": replace(
        _WINDOWED["gpt-oss"],
        weight_type=Q.Q8_0,
        tensor_types={
            f"blk.{layer_idx}.ffn_{part}_exps.weight": Q.MXFP4
            for layer_idx in range(4)
            for part in ("gate", "up", "down")
        },
    ),
}
ONLY_90 = {entry.build().name for entry in every_entry() if entry.only == (9, 0)}
CACHE_TYPES = ((KvType.F16, KvType.F16), (KvType.F32, KvType.Q8_0), (KvType.TURBO4, KvType.Q4_0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "quantised.gguf", MODELS["quantised"])


class Start:
    """One start of a program: the lines it said and the notes it left."""

    def __init__(self, root: Path, model: Path, types: tuple[KvType, KvType] = CACHE_TYPES[0]) -> None:
        self.lines: list[str] = []
        self.files = KernelFiles(root, report=self.lines.append)
        backend = CudaBackend(DeviceName(kind="cuda"), kernel_files=self.files)
        try:
            with open_model(model) as model_file:
                backend.load_weights(model_file)
                config = RunConfig(model_path=model, n_ctx=512, page_tokens=64, type_k=types[0], type_v=types[1])
                plan = plan_run(config, read_model_shape(model_file), backend.budget())
                with Session(plan, backend) as session:
                    session.prefill([1, 2, 3, 4, 5] * 8)
                    session.decode([6])
            self.notes = backend.notes
        finally:
            backend.close()


def test_a_second_start_compiles_nothing(fake: FakeDriver, model: Path, tmp_path: Path) -> None:
    first = Start(tmp_path, model)
    n_kernels = len(fake.compiled)
    assert n_kernels == len(fake.loaded) > 10
    assert first.lines == [f"compiling {n_kernels} CUDA kernels (first start on this device)"]
    assert first.files.state("sm_90a-").n_matching == n_kernels

    fake.forget_kernels()
    second = Start(tmp_path, model)
    assert fake.compiled == []
    assert len(fake.loaded) == n_kernels
    assert second.lines == []
    assert (first.notes, second.notes) == ((), ())


def test_a_damaged_kernel_alone_is_compiled_again(fake: FakeDriver, model: Path, tmp_path: Path) -> None:
    folder = Path(Start(tmp_path, model).files.state("").path)
    (damaged,) = folder.glob("*-rms_norm_kernel-*")
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])

    fake.forget_kernels()
    assert Start(tmp_path, model).lines == ["compiling 1 CUDA kernel (first start on this device)"]
    assert fake.compiled == ["rms_norm_kernel"]
    assert damaged.read_bytes() == whole


def test_code_that_the_driver_refuses_is_compiled_again(fake: FakeDriver, tmp_path: Path) -> None:
    kernel = elementwise.build_add_kernel()
    keep_kernels(KernelFiles(tmp_path, report=lambda _: None))
    kernel.prepare()
    fake.forget_kernels()
    fake.refuse_modules = True
    assert not kernel.load()
    fake.refuse_modules = False
    assert kernel.load()
    assert fake.compiled == []


def test_without_a_folder_it_runs_and_says_so_once(fake: FakeDriver, model: Path, tmp_path: Path) -> None:
    (tmp_path / "kvs").write_text("a file where the folder should be")
    start = Start(tmp_path, model)
    assert len(start.notes) == 1
    assert "compiled again at every start" in start.notes[0]
    assert len(fake.loaded) > 10


def test_without_files_every_kernel_is_compiled_and_loaded(fake: FakeDriver) -> None:
    kernel = elementwise.build_add_kernel()
    keep_kernels(None)
    assert not kernel.load()
    kernel.prepare()
    assert fake.compiled == ["add_kernel"]


def test_shared_memory_is_asked_for_by_kept_kernels_too(fake: FakeDriver, model: Path, tmp_path: Path) -> None:
    Start(tmp_path, model)
    cold = sorted(fake.shared_bytes.values())
    fake.forget_kernels()
    fake.shared_bytes.clear()
    Start(tmp_path, model)
    assert sorted(fake.shared_bytes.values()) == cold
    assert max(cold) > 0


@pytest.mark.parametrize("types", CACHE_TYPES, ids=lambda types: f"{types[0].value}-{types[1].value}")
@pytest.mark.parametrize("name", MODELS)
def test_everything_that_is_launched_was_prepared_when_the_session_opened(
    fake: FakeDriver, tmp_path: Path, name: str, types: tuple[KvType, KvType]
) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    Start(tmp_path, path, types)
    check_prepared(fake)


@pytest.mark.parametrize("generation", [(8, 6), (12, 0)], ids=lambda generation: f"sm_{generation[0]}{generation[1]}")
@pytest.mark.parametrize("name", MODELS)
def test_other_generations_launch_what_they_can_run_and_prepared(
    fake: FakeDriver, tmp_path: Path, name: str, generation: tuple[int, int]
) -> None:
    fake.generation = generation
    path = write_model(tmp_path / "model.gguf", MODELS[name])
    Start(tmp_path, path)
    check_prepared(fake)
    assert not {kernel.name for kernel in fake.launched} & ONLY_90


def test_a_check_of_another_generation_reaches_every_choice(
    fake: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf", MODELS["streamed"])
    Start(tmp_path, path)
    assert {kernel.name for kernel in fake.launched} > {"stream_matvec_kernel", "attention_prefill_wgmma_kernel"}
    for found in iter_modules(cuda_kernels.__path__):
        module = import_module(f"cuda_kernels.{found.name}")
        if hasattr(module, "device_capability"):
            monkeypatch.setattr(module, "device_capability", module.device_capability)  # put back afterwards
    monkeypatch.setattr(CudaBackend, "_compute_capability", CudaBackend._compute_capability)
    fake.forget_kernels()
    take_kernels_of((8, 9))
    Start(tmp_path, path)
    check_prepared(fake)
    assert not {kernel.name for kernel in fake.launched} & ONLY_90


def check_prepared(fake: FakeDriver) -> None:
    # while weights are read, before the plan is asked for kernels
    loaders = {
        "split_planes_kernel",
        "rearrange_kernel",
        "rearrange_bits_kernel",
        "rearrange_q2_k_kernel",
        "rearrange_q3_k_kernel",
        "rearrange_q6_k_kernel",
        "number_levels_kernel",
    }
    missing = {kernel.name for kernel in set(fake.launched) - set(fake.loaded)} - loaders
    assert not missing
    never = {kernel.name for kernel in set(fake.loaded) - set(fake.launched)}
    assert never <= {"count_kernel"}, "kernels that no step launches cost compile time"


def test_every_builder_names_what_it_builds() -> None:
    modules = [import_module(f"cuda_kernels.{found.name}") for found in iter_modules(cuda_kernels.__path__)]
    builders = {
        member for module in modules for name, member in getmembers(module) if name.startswith("build_") and
        name.endswith("_kernel")
    }  # fmt: skip
    unnamed = [builder.__name__ for builder in builders if not hasattr(builder, "cache_info")]
    assert not unnamed
    assert len(builders) > 15


def test_names_differ_and_hold_no_addresses() -> None:
    kernels = [entry.build() for entry in decode_entries() + recurrent_entries() + other_entries()]
    assert all(kernel.case is not None and " at 0x" not in kernel.case for kernel in kernels)
    assert len({kernel.case for kernel in kernels}) == len(set(kernels))
    assert len({kernel._file_name((9, 0)) for kernel in kernels}) == len(set(kernels))


BASE: dict[str, Any] = {
    "name": "k",
    "case": "build_k(64)",
    "signature": (launch.types.int64,),
    "launch_bounds": (128,),
    "compute_capability": (9, 0),
}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "l"},
        {"case": "build_k(128)"},
        {"signature": (launch.types.int32,)},
        {"launch_bounds": (128, 2)},
        {"compute_capability": (8, 9)},
    ],
)
def test_a_name_depends_on_everything_a_kernel_is_compiled_from(change: dict[str, Any]) -> None:
    assert file_name(**BASE) == file_name(**BASE)
    assert file_name(**{**BASE, **change}) != file_name(**BASE)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of both packages' sources, which ``version_hash`` reads."""
    for package, module in (("cuda_kernels", cubin), ("kvs_core", cubin.kvs_core)):
        shutil.copytree(Path(module.__file__ or "").parent, tmp_path / package, ignore=shutil.ignore_patterns("__py*"))
    monkeypatch.setattr(cubin, "__file__", str(tmp_path / "cuda_kernels" / "cubin.py"))
    monkeypatch.setattr(cubin.kvs_core, "__file__", str(tmp_path / "kvs_core" / "__init__.py"))
    return tmp_path


@pytest.mark.parametrize("name", ["cuda_kernels/emit.py", "cuda_kernels/norm.py", "kvs_core/kv_types.py"])
def test_an_edit_changes_the_version(sources: Path, name: str) -> None:
    compute = cubin.version_hash.__wrapped__
    before = compute()
    assert before == compute()
    with (sources / name).open("a") as file:
        file.write("\n")
    assert compute() != before


def test_options_and_packages_change_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = cubin.version_hash.__wrapped__
    seen = {compute()}
    with monkeypatch.context() as patch:
        patch.setitem(cubin._OPTIONS, "fastmath", True)
        seen.add(compute())
    real = cubin._version_of
    for package in (*cubin._PACKAGES, *cubin._COMPILERS.values()):
        with monkeypatch.context() as patch:
            patch.setattr(cubin, "_version_of", lambda name, changed=package: real(name) + "+" * (name == changed))
            seen.add(compute())
    assert len(seen) == 2 + len(cubin._PACKAGES) + len(cubin._COMPILERS)
    assert all(len(version) == 16 for version in seen)


def test_a_compiler_from_elsewhere_is_known_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "_version_of", lambda _: "missing")
    assert "libnvvm" in cubin._identify_compiler("nvvm", "nvidia-nvvm")


@pytest.mark.parametrize("generation", [(8, 0), (9, 0)])
def test_a_kernel_becomes_machine_code_without_a_device(generation: tuple[int, int]) -> None:
    kernel = matvec.build_matvec_kernel(Q.Q8_0, 1, 2, False, 6)
    code = compile_cubin(kernel.function, kernel.signature, kernel.launch_bounds, generation)
    assert code.code[:4] == b"\x7fELF"
    assert code.entry.encode() in code.code
    assert Cubin.from_bytes(code.to_bytes()) == code
    assert f".target {target_of(generation)}" in kernel.ptx(generation)
    assert ".maxntid 128" in kernel.ptx(generation).replace(", 1, 1", "")
    assert ".minnctapersm 6" in kernel.ptx(generation)


def test_ptx_that_is_not_understood_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "compile_ptx", lambda *_: ".visible .func f")
    kernel: Kernel = elementwise.build_add_kernel()
    with pytest.raises(cubin.BackendError, match="compiled add_kernel to 0 kernels, needs one"):
        compile_cubin(kernel.function, kernel.signature, kernel.launch_bounds, (9, 0))
