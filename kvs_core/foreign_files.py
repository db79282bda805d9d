"""What a file that is not GGUF looks like, judged by its first bytes; nothing here opens files."""

from __future__ import annotations

from dataclasses import dataclass

SNIFFED_BYTES = 512
_SHOWN_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFile:
    """What the bytes look like, as the end of a sentence, and what the user can do about it."""

    looks_like: str
    hint: str


_LFS = ForeignFile(
    looks_like="a Git-LFS pointer, the small text that stands for a file that was not downloaded",
    hint="run 'git lfs pull' in the folder it came from, or download the file itself",
)
_HTML = ForeignFile(
    looks_like="an HTML page, such as a web site's error or login page",
    hint="download the file itself; links to model files often need a login or end in '?download=true'",
)
_ZIP = ForeignFile(
    looks_like="a zip archive (PyTorch checkpoints are zip archives too)",
    hint="unpack it, or convert the checkpoint to GGUF with llama.cpp's convert_hf_to_gguf.py",
)
_COMPRESSED = ForeignFile(looks_like="a compressed file", hint="decompress it first")
_SAFETENSORS = ForeignFile(
    looks_like="a safetensors file",
    hint="convert the model to GGUF with llama.cpp's convert_hf_to_gguf.py, or download a GGUF of it",
)
_OLD_GGML = ForeignFile(
    looks_like="a model in the GGML format that GGUF replaced in 2023",
    hint="download a GGUF of this model, or convert the original again",
)
_JSON = ForeignFile(
    looks_like="JSON text, such as a configuration or a server's error reply",
    hint="pass the .gguf file of the model",
)
_ZEROS = ForeignFile(
    looks_like="a download that reserved its space but was never filled (only zero bytes)", hint="download it again"
)
_OTHER = ForeignFile(looks_like="", hint="pass a model in GGUF format; its first four bytes are GGUF")

_COMPRESSED_MAGICS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh", b"7z\xbc\xaf\x27\x1c")
# Stored as little-endian numbers, so the letters come reversed: ggml, ggmf, ggjt, ggla (an adapter).
_OLD_GGML_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")


def recognise(first_bytes: bytes, file_bytes: int) -> ForeignFile:
    """Guess what a file of ``file_bytes`` bytes is from its first SNIFFED_BYTES."""
    text = first_bytes.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if first_bytes.startswith(b"version https://git-lfs"):
        return _LFS
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return _HTML
    if first_bytes.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _ZIP
    if first_bytes.startswith(_COMPRESSED_MAGICS):
        return _COMPRESSED
    if first_bytes.startswith(_OLD_GGML_MAGICS):
        return _OLD_GGML
    if first_bytes[8:9] == b"{" and 2 <= int.from_bytes(first_bytes[:8], "little") <= file_bytes - 8:
        return _SAFETENSORS
    if text.startswith((b"{", b"[")):
        return _JSON
    if not first_bytes.strip(b"\0"):
        return _ZEROS
    return _OTHER


def show_bytes(first_bytes: bytes) -> str:
    """The first bytes as text and in hexadecimal: ``"<!DOCTYPE html>" (3c 21 44 ...)``."""
    shown = first_bytes[:_SHOWN_BYTES]
    text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in shown)
    return f'"{text}" ({shown.hex(" ")})'
