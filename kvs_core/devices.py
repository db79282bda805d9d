"""What ``--device`` may say, and which of the visible GPUs it means. Pure: nothing is asked for or opened here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvs_core.errors import BackendUnavailableError, UnsupportedError

KNOWN_DEVICES = "auto, cpu, cuda, cuda:N, cuda:GPU-UUID"
_UUID_START = re.compile(r"GPU-[0-9a-f-]+", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceName:
    """A device as it was asked for: ``kind`` is auto, cpu or cuda; a GPU by its number or by the start of its UUID."""

    kind: str
    index: int = 0
    uuid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleGpu:
    """A GPU that the driver shows; its place in the list is its number."""

    name: str
    uuid: str


def find_device_problem(text: str) -> str | None:
    """Why ``text`` names no device; None when it does, whether or not that device is here."""
    kind, separator, rest = text.partition(":")
    if text in ("auto", "cpu", "cuda"):
        return None
    bare = text if not separator else rest if kind == "cuda" else ""
    if bare.upper().startswith("MIG-"):
        return f"a MIG instance, which is chosen with CUDA_VISIBLE_DEVICES={bare} and is cuda:0 then"
    if kind == "cuda" and separator and ((rest.isascii() and rest.isdecimal()) or _UUID_START.fullmatch(rest)):
        return None
    if text != text.lower() and find_device_problem(text.lower()) is None:
        return f"not a device; write {text.lower()} in lower case"
    if _UUID_START.fullmatch(text):
        return f"not a device; write cuda:{text}"
    return f"not a device; allowed: {KNOWN_DEVICES}"


def parse_device(text: str) -> DeviceName:
    """Raises UnsupportedError for a text that names no device."""
    problem = find_device_problem(text)
    if problem is not None:
        raise UnsupportedError(f"device {text!r}: {problem}", hint="use auto, cpu, cuda or cuda:N")
    kind, _, rest = text.partition(":")
    if rest.isdecimal():
        return DeviceName(kind=kind, index=int(rest))
    return DeviceName(kind=kind, uuid=rest or None)


def explain_no_driver(environ: Mapping[str, str]) -> str:
    """What to do when the driver shows no device: the variable that hides devices comes first where it is set."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f"CUDA_VISIBLE_DEVICES={visible} may hide the device: unset it; otherwise "
    return f"{hidden}see what nvidia-smi says of the driver; runs with --device cpu need none"


def find_gpu(wanted: DeviceName, gpus: Sequence[VisibleGpu]) -> int:
    """Number of the GPU that ``wanted`` means; BackendUnavailableError lists them all otherwise.

    CUDA_VISIBLE_DEVICES has been applied to ``gpus``: numbers count visible devices, a UUID may be cut short.
    """
    if wanted.uuid is None:
        found = [wanted.index] if wanted.index < len(gpus) else []
        shown = f"cuda:{wanted.index}"
    else:
        start = wanted.uuid.lower()
        found = [index for index, gpu in enumerate(gpus) if gpu.uuid.lower().startswith(start)]
        shown = f"cuda:{wanted.uuid}"
    if len(found) == 1:
        return found[0]
    here = "; ".join(f"cuda:{index} is {gpu.name}, {gpu.uuid}" for index, gpu in enumerate(gpus)) or "there is none"
    reason = f"begins the UUID of {len(found)} devices" if found else "is not a device of this machine"
    raise BackendUnavailableError(
        f"device {shown} {reason}: {here}",
        hint="name one of these, or check CUDA_VISIBLE_DEVICES, which hides devices and numbers the others",
    )
