"""The body of ``kvs doctor``: what a GPU has, how fast it moves bytes, and whether runs on it can work."""

from __future__ import annotations

import os
from dataclasses import asdict
from importlib import import_module
from typing import Any

from kvs_cli.console import Console
from kvs_cli.environment import cache_root
from kvs_core.devices import parse_device
from kvs_core.errors import BackendUnavailableError, ConfigError
from kvs_core.host_memory import free_host_bytes, total_host_bytes
from kvs_core.kernel_files import KernelFiles
from kvs_core.units import GIB, MIB, show_size


def examine(device: str, console: Console) -> None:
    """Print a table, or one document; a device that cannot be used raises, which is exit code 5."""
    wanted = parse_device("cuda" if device == "auto" else device)
    if wanted.kind == "cpu":
        raise ConfigError("--device cpu: doctor looks at GPUs only", hint="leave --device out, or give cuda:N")
    try:
        module = import_module("cuda_kernels.doctor")
    except ImportError as error:
        raise BackendUnavailableError(
            f"device {device}: a CUDA package is missing: {error}",
            hint="install kvs-toolkit[cuda]; --device cpu needs none",
        ) from error
    kernel_files = KernelFiles(cache_root(os.environ), report=console.info)
    report = asdict(module.examine_device(wanted, kernel_files))
    host = {"host_total_bytes": total_host_bytes(), "host_free_bytes": free_host_bytes()}
    if console.json:
        console.write_json({"command": "doctor", "device": report, **host})
        return
    console.write_text("".join(f"{name:18}{text}\n" for name, text in _lines({**report, **host})))


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    limit = report["page_lock_limit_bytes"]
    link = (
        f"generation {report['link_generation']}, {report['link_width']} lanes" if report["link_width"] else "unknown"
    )
    return [
        ("device", f"{report['name']}, compute capability {report['compute_capability']}"),
        ("driver", report["driver_version"]),
        ("device memory", f"{_gib(report['free_bytes'])} of {_gib(report['total_bytes'])} free"),
        ("host memory", f"{_gib(report['host_free_bytes'])} of {_gib(report['host_total_bytes'])} free"),
        ("link", link),
        ("host to device", _rate(report["host_to_device_rate"])),
        ("device to host", _rate(report["device_to_host_rate"])),
        ("within the device", f"{_rate(report['device_memory_rate'])}, read and written"),
        ("page locking", report["page_lock_note"] or f"{_rate(report['page_lock_rate'])}"),
        ("page-lock limit", "none" if limit is None else f"{limit / MIB:.0f} MiB"),
        ("first kernel", f"loaded or compiled, run and checked in {report['first_kernel_seconds']:.2f} s"),
        ("kernel cache", report["kernel_cache_warning"] or _kept_kernels(report["kernel_cache"])),
        *((f"  {name}", text) for name, text in report["versions"].items()),
        ("result", "runs with --device cuda can work"),
    ]


def _kept_kernels(state: dict[str, Any]) -> str:
    if not state["n_matching"]:
        return f"{state['path']}: no kernels for this device yet, the first start compiles them"
    kept = f"{state['n_kernels']} kernels, {show_size(state['n_bytes'])}"
    return f"{state['path']}: {kept}, {state['n_matching']} of them for this device"


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.1f} GiB"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
