"""llama.cpp as the reference, in this process: tokens, raw logits and greedy text through the C interface of libllama.

Used by the golden-file scripts. Works with a libllama.so built from source or with the module of the PyPI package
`xllamacpp`, which exports the same C functions; `--llama-lib` or the variable LLAMA_LIB names another file.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

GGML_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
LOG_LEVEL_ERROR = 4

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class ModelParams(ctypes.Structure):
    """llama_model_params as an opaque block: the library's own defaults are passed on untouched."""

    _fields_ = [("opaque", ctypes.c_uint64 * 64)]


class ContextParams(ctypes.Structure):
    """llama_context_params up to the last field set here; the padding leaves room for the rest of any version.

    Both structures travel on the stack, so a block longer than the library's own is harmless.
    """

    _fields_ = [
        ("n_ctx", ctypes.c_uint32),
        ("n_batch", ctypes.c_uint32),
        ("n_ubatch", ctypes.c_uint32),
        ("n_seq_max", ctypes.c_uint32),
        ("n_rs_seq", ctypes.c_uint32),
        ("n_outputs_max", ctypes.c_uint32),
        ("n_outputs_max_per_seq", ctypes.c_uint32),
        ("n_threads", ctypes.c_int32),
        ("n_threads_batch", ctypes.c_int32),
        ("ctx_type", ctypes.c_int),
        ("rope_scaling_type", ctypes.c_int),
        ("pooling_type", ctypes.c_int),
        ("attention_type", ctypes.c_int),
        ("flash_attn_type", ctypes.c_int),
        ("rope_freq_base", ctypes.c_float),
        ("rope_freq_scale", ctypes.c_float),
        ("yarn_ext_factor", ctypes.c_float),
        ("yarn_attn_factor", ctypes.c_float),
        ("yarn_beta_fast", ctypes.c_float),
        ("yarn_beta_slow", ctypes.c_float),
        ("yarn_orig_ctx", ctypes.c_uint32),
        ("defrag_thold", ctypes.c_float),
        ("cb_eval", ctypes.c_void_p),
        ("cb_eval_user_data", ctypes.c_void_p),
        ("type_k", ctypes.c_int),
        ("type_v", ctypes.c_int),
        ("padding", ctypes.c_uint64 * 64),
    ]


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class OracleError(RuntimeError):
    """llama.cpp refused or failed; carries its last error lines."""


def find_library(path: str | None = None) -> Path:
    """The given file, else LLAMA_LIB, else the module of an installed `xllamacpp`."""
    if named := path or os.environ.get("LLAMA_LIB"):
        return Path(named)
    spec = importlib.util.find_spec("xllamacpp")
    modules = [] if spec is None or spec.origin is None else sorted(Path(spec.origin).parent.glob("xllamacpp*.so"))
    if not modules:
        raise OracleError("no llama.cpp library: set LLAMA_LIB to a libllama.so, or pip install xllamacpp")
    return modules[0]


class LlamaLibrary:
    """The C functions of one libllama, with their types, and the error lines it logged."""

    def __init__(self, path: str | None = None) -> None:
        self.path = find_library(path)
        self.errors: list[str] = []
        self.lib = ctypes.CDLL(str(self.path))
        self._declare()
        self._log_callback = LogCallback(self._on_log)  # kept: the library holds only its address
        self.lib.llama_log_set(self._log_callback, None)
        self.lib.llama_backend_init()
        self._check_layout()

    @property
    def build(self) -> str:
        """Which llama.cpp this is, for the head of a golden file."""
        return f"ggml {self.lib.ggml_version().decode()}, commit {self.lib.ggml_commit().decode()}"

    def context_params(self) -> ContextParams:
        params = self.lib.llama_context_default_params()
        assert isinstance(params, ContextParams)
        return params

    def _declare(self) -> None:
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
        flag = ctypes.c_bool
        signatures: dict[str, tuple[object, list[object]]] = {
            "ggml_version": (text, []),
            "ggml_commit": (text, []),
            "llama_backend_init": (None, []),
            "llama_log_set": (None, [LogCallback, pointer]),
            "llama_model_default_params": (ModelParams, []),
            "llama_context_default_params": (ContextParams, []),
            "llama_model_load_from_file": (pointer, [text, ModelParams]),
            "llama_model_free": (None, [pointer]),
            "llama_model_get_vocab": (pointer, [pointer]),
            "llama_vocab_n_tokens": (number, [pointer]),
            "llama_init_from_model": (pointer, [pointer, ContextParams]),
            "llama_free": (None, [pointer]),
            "llama_n_ctx": (ctypes.c_uint32, [pointer]),
            "llama_get_memory": (pointer, [pointer]),
            "llama_memory_clear": (None, [pointer, flag]),
            "llama_decode": (number, [pointer, Batch]),
            "llama_get_logits": (ctypes.POINTER(ctypes.c_float), [pointer]),
            "llama_tokenize": (number, [pointer, text, number, ctypes.POINTER(number), number, flag, flag]),
            "llama_detokenize": (number, [pointer, ctypes.POINTER(number), number, text, number, flag, flag]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.lib, name)
            function.restype = result
            function.argtypes = arguments

    def _check_layout(self) -> None:
        """Refuse a library with another layout of the context parameters: its defaults must be where we read."""
        params = self.context_params()
        seen = (params.n_ctx, params.n_batch, params.n_ubatch, params.type_k, params.type_v, params.rope_scaling_type)
        seen += (params.flash_attn_type, params.yarn_ext_factor, params.defrag_thold)
        if seen != (512, 2048, 512, GGML_TYPES["f16"], GGML_TYPES["f16"], -1, -1, -1.0, -1.0):
            raise OracleError(f"{self.path}: unknown layout of llama_context_params (defaults read as {seen})")

    def _on_log(self, level: int, message: bytes | None, _user_data: object) -> None:
        if level == LOG_LEVEL_ERROR and message:
            self.errors.append(message.decode(errors="replace").strip())


class LlamaOracle:
    """One model with one context, on the CPU.

    type_k, type_v   names from GGML_TYPES; f32 is the default here, unlike llama.cpp's f16, because it compares best
    flash_attn       off by default: with it on llama.cpp rounds f32 K and V to f16 on the way into its kernel
    n_ctx            room for tokens; `logits` and `greedy` start from an empty cache each time
    Raises           OracleError with llama.cpp's own words when it does not load the model or make the context
    """

    def __init__(
        self,
        model_path: Path | str,
        *,
        library: LlamaLibrary | None = None,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        type_k: str = "f32",
        type_v: str = "f32",
        flash_attn: bool = False,
        n_threads: int = 2,
    ) -> None:
        self.library = library or LlamaLibrary()
        self._lib = self.library.lib
        self._model: int | None = None
        self._context: int | None = None
        self.library.errors.clear()

        self._model = self._lib.llama_model_load_from_file(
            os.fsencode(model_path), self._lib.llama_model_default_params()
        )
        if not self._model:
            raise OracleError(f"llama.cpp did not load {model_path}: {'; '.join(self.library.errors)}")
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self.n_vocab: int = self._lib.llama_vocab_n_tokens(self._vocab)

        params = self.library.context_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_ctx, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = int(flash_attn)
        params.type_k, params.type_v = GGML_TYPES[type_k], GGML_TYPES[type_v]
        self._context = self._lib.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise OracleError(f"llama.cpp made no context for {model_path}: {'; '.join(self.library.errors)}")
        self.n_ctx: int = self._lib.llama_n_ctx(self._context)

    def __enter__(self) -> LlamaOracle:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._context = self._model = None

    def tokenize(self, text: str | bytes, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        raw = text.encode() if isinstance(text, str) else text
        room = len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        n_ids = self._lib.llama_tokenize(self._vocab, raw, len(raw), ids, room, add_special, parse_special)
        if n_ids < 0:
            raise OracleError(f"llama_tokenize wants room for {-n_ids} tokens; {len(raw)} bytes were given")
        return list(ids[:n_ids])

    def detokenize(self, tokens: Sequence[int], *, remove_special: bool = False, unparse_special: bool = True) -> bytes:
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        room = 64
        while True:
            text = ctypes.create_string_buffer(room)
            n_bytes = self._lib.llama_detokenize(
                self._vocab, ids, len(tokens), text, room, remove_special, unparse_special
            )
            if n_bytes >= 0:
                return text.raw[:n_bytes]
            room = -n_bytes

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 [n_tokens, n_vocab] after each token of a fresh sequence, in one batch."""
        self.clear()
        return self.decode(tokens, begin=0)

    def greedy(self, prompt: Sequence[int], n_predict: int) -> tuple[list[int], list[tuple[int, float]]]:
        """Tokens of highest logit, one by one, and for each the runner-up and how far behind it was."""
        self.clear()
        row = self.decode(prompt, begin=0)[-1]
        chosen: list[int] = []
        runners_up: list[tuple[int, float]] = []
        for step in range(n_predict):
            best = int(np.argmax(row))
            rest = row.copy()
            rest[best] = -np.inf
            second = int(np.argmax(rest))
            chosen.append(best)
            runners_up.append((second, float(row[best] - row[second])))
            if step + 1 < n_predict:
                row = self.decode([best], begin=len(prompt) + step)[-1]
        return chosen, runners_up

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def decode(self, tokens: Sequence[int], *, begin: int, n_skip: int = 0) -> np.ndarray:
        """float32 [n_tokens - n_skip, n_vocab] for tokens at positions from `begin` on, after what is in the cache.

        n_skip   first tokens whose logits are not wanted; llama.cpp then leaves them out of its last products too
        """
        n_tokens = len(tokens)
        wanted = [0] * n_skip + [1] * (n_tokens - n_skip)
        sequence = (ctypes.c_int32 * 1)(0)
        sequences = (ctypes.POINTER(ctypes.c_int32) * n_tokens)(*[sequence] * n_tokens)
        batch = Batch(
            n_tokens=n_tokens,
            token=(ctypes.c_int32 * n_tokens)(*tokens),
            embd=None,
            pos=(ctypes.c_int32 * n_tokens)(*range(begin, begin + n_tokens)),
            n_seq_id=(ctypes.c_int32 * n_tokens)(*[1] * n_tokens),
            seq_id=sequences,
            logits=(ctypes.c_int8 * n_tokens)(*wanted),
        )
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise OracleError(f"llama_decode failed with {status}: {'; '.join(self.library.errors)}")
        rows = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape=(n_tokens - n_skip, self.n_vocab))
        return rows.copy()
