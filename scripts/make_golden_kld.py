"""Golden files of perplexity and KL divergence on two tiny models, from llama-perplexity.

`make_golden_kld.py --llama-bin DIR`, where DIR holds llama-perplexity and libllama.so. Written to tests/data:

kld_tiny_text.txt     the text
kld_tiny_base.kld     base log-probs of the model `untied`, in llama.cpp's format
kld_tiny_logits.npz   exact float32 logits of the scored positions: `base` of that model, `other` of `rope-factors`
kld_tiny_other.txt    what `--kl-divergence` printed for the second model against that file
perplexity_tiny.json  perplexities of both models with and without a stride
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.llama_oracle import LlamaLibrary, LlamaOracle
from tests.fixtures.tiny_models import make_text, tiny_catalogue

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
N_CTX = 64
N_CHUNKS = 4
N_ATTEMPTS = 40
FINAL_LINE = r"PPL = ([\d.]+) \+/- ([\d.]+)"
BASE, OTHER = "untied", "rope-factors"
# one chunk per batch, or llama-perplexity packs several and other products round differently
COMMON_FLAGS = f"-t 2 -c {N_CTX} -b {N_CTX} -ctk f32 -ctv f32 -fa off".split()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--llama-bin", type=Path, required=True)
    arguments = parser.parse_args()
    tool = arguments.llama_bin / "llama-perplexity"
    library = LlamaLibrary(str(arguments.llama_bin / "libllama.so"))
    made_by = f"llama.cpp, {library.build}, CPU, flags {' '.join(COMMON_FLAGS)}"

    text_path, base_path = DATA / "kld_tiny_text.txt", DATA / "kld_tiny_base.kld"
    text_path.write_text(make_text(n_words=90, seed=3), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        models = {name: tiny_catalogue()[name](Path(folder) / f"{name}.gguf") for name in (BASE, OTHER)}
        perplexities = {name: _perplexities(tool, path, text_path) for name, path in models.items()}
        base_flags = ("--kl-divergence-base", str(base_path))
        _run(tool, models[BASE], text_path, "--chunks", str(N_CHUNKS), *base_flags, last_line=FINAL_LINE)
        printed = _run(tool, models[OTHER], None, *base_flags, "--kl-divergence", last_line="Same top p:")
        statistics = "".join(line + "\n" for line in _answer_lines(printed))
        logits = {
            key: _scored_logits(library, models[name], base_path) for key, name in (("base", BASE), ("other", OTHER))
        }

    _check_belongs(logits["base"], base_path)
    (DATA / "kld_tiny_other.txt").write_text(f"# {made_by}\n{statistics}", encoding="utf-8")
    np.savez_compressed(DATA / "kld_tiny_logits.npz", made_by=np.array(made_by), **logits)
    content = {"made_by": made_by, "n_ctx": N_CTX, "models": perplexities}
    (DATA / "perplexity_tiny.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(statistics)
    return 0


def _run(tool: Path, model: Path, text: Path | None, *flags: str, last_line: str) -> str:
    """Output of one call, repeated until `last_line` is in it: llama.cpp leaves without waiting for its log thread."""
    text_flags = [] if text is None else ["-f", str(text)]
    command = [str(tool), "-m", str(model), *text_flags, *COMMON_FLAGS, *flags]
    for _attempt in range(N_ATTEMPTS):
        finished = subprocess.run(command, capture_output=True, text=True, check=False)
        output = finished.stdout + finished.stderr
        if finished.returncode != 0:
            break
        if re.search(last_line, output):
            return output
    raise SystemExit(f"error: {' '.join(command)} did not print {last_line!r}:\n{output}")


def _perplexities(tool: Path, model: Path, text: Path) -> dict[str, object]:
    """Running perplexities as printed, plain and with a stride of a quarter of the context."""
    plain = _run(tool, model, text, last_line=FINAL_LINE)
    final = re.search(FINAL_LINE, plain)
    strided_flags = ("--ppl-stride", str(N_CTX // 4), "--chunks", str(N_CHUNKS))
    strided = _run(tool, model, text, *strided_flags, last_line=rf"\[{N_CHUNKS}\][\d.]+,")
    window = re.search(r"Calculation chunk = (\d+)", strided)
    assert final is not None
    assert window is not None
    return {
        "running": _running(plain),
        "final": float(final[1]),
        "uncertainty": float(final[2]),
        "stride": N_CTX // 4,
        "stride_window": int(window[1]),
        "stride_running": _running(strided),
    }


def _running(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"\[\d+\]([\d.]+),", printed)]


def _answer_lines(printed: str) -> list[str]:
    """The table of chunks and the statistics, without log lines (those begin with a time)."""
    lines = [line.rstrip() for line in printed.splitlines()]
    begin = next(idx for idx, line in enumerate(lines) if line.startswith("chunk "))
    end = next(idx for idx, line in enumerate(lines) if line.startswith("Same top p:"))
    return lines[begin : end + 1]


def _scored_logits(library: LlamaLibrary, model: Path, base_path: Path) -> np.ndarray:
    """float32 [n_chunks, n_scored, n_vocab]: logits after positions n_ctx/2 to n_ctx - 2 of each chunk, BOS first."""
    chunks = _tokens_of(base_path)
    first = N_CTX // 2
    rows = []
    with LlamaOracle(model, library=library, n_ctx=N_CTX, n_ubatch=N_CTX) as oracle:
        for chunk in chunks:
            oracle.clear()
            rows.append(oracle.decode([1, *chunk[1:].tolist()], begin=0, n_skip=first)[:-1])
    return np.stack(rows)


def _tokens_of(base_path: Path) -> np.ndarray:
    return np.frombuffer(base_path.read_bytes(), np.int32, count=N_CHUNKS * N_CTX, offset=20).reshape(N_CHUNKS, N_CTX)


def _check_belongs(logits: np.ndarray, base_path: Path) -> None:
    """The logits we asked for are those in the file: each 16-bit row must be the nearest step to ours."""
    n_vocab = logits.shape[-1]
    row_words = 2 * ((n_vocab + 1) // 2) + 4
    words = np.frombuffer(base_path.read_bytes(), np.uint16, offset=20 + N_CHUNKS * N_CTX * 4)
    rows = words.reshape(*logits.shape[:2], row_words)
    exact = logits.astype(np.float64)
    lowest = np.maximum(exact.min(axis=-1, keepdims=True), exact.max(axis=-1, keepdims=True) - 16)
    steps = np.maximum(0, (exact - lowest) * 65535 / (exact.max(axis=-1, keepdims=True) - lowest))
    off = np.abs(rows[..., 4 : 4 + n_vocab] - steps).max()
    if off > 0.51:
        raise SystemExit(f"error: logits and {base_path.name} differ by up to {off:.2f} steps of 65535")
    print(f"{base_path.name} agrees with the logits: at most {off:.4f} steps of 65535 apart")


if __name__ == "__main__":
    raise SystemExit(main())
