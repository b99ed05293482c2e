"""llama.cpp computes what this server computes of the same GGUF file: `make test-gguf`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from mlxpaged.models.gguf.directory import gguf_directory
from mlxpaged.models.gguf.tokenizer import SPLITS
from tests.models.architectures import make_architecture
from tests.models.gguf_models import as_gguf
from tests.models.test_gguf import MODELS, loaded
from tests.support import demo_vocab_size, make_tiny_model

pytestmark = pytest.mark.llamacpp

PROGRAM = Path(__file__).with_name("program.py")
PROMPT = [40, 51, 62, 73, 84, 95, 106, 117, 128, 139, 150, 161, 172, 183, 194, 205]
DIFFERENCE = 0.03
"""Of logarithms of probabilities: llama.cpp keeps keys and values in float16. A wrong rope or norm is above 0.3."""
CLEAR = 0.05
"""Difference of the two best tokens' logarithms, above which both choose the same one."""

CHANGES: dict[str, dict[str, Any]] = {"deepseek_v2": {"topk_method": "greedy", "n_group": 1, "topk_group": 1}}
"""llama.cpp chooses groups of experts as DeepSeek V3 does, in V2 too."""

TEXTS = [
    "don't WE'LL I'm x=12345 + 6789.01",
    "  leading spaces\n\n\nnewlines \n \t tabs\t\tend  ",
    "naïve café über Straße, 日本語のテキスト 中文字符 한국어, 🙂🙃 emoji",
    "HelloWorld camelCaseWord's (a)[b]{c}<d> !!! ??? ... a_b-c/d\\e",
    "\r\n\r\n x",
    "1234567890 ١٢٣",
    "   ",
    "a\u00a0b\u3000c url: https://x.y/z?q=1&r=2#3",
]


def llama_cpp(file: Path, prompt: list[int], texts: list[str]) -> dict[str, Any]:
    asked = {"file": str(file), "prompt": prompt, "num_tokens": 4, "texts": texts}
    command = [os.environ["MLXPAGED_LLAMACPP"], str(PROGRAM)]
    ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def with_vocabulary(changes: dict[str, Any], size: int) -> dict[str, Any]:
    """All tokens of the tokenizer, as llama.cpp wants them."""
    names = ("vocab_size", "vocab_size_per_layer_input")
    text = {"text_config": changes["text_config"] | {"vocab_size": size}} if "text_config" in changes else {}
    return changes | dict.fromkeys(names, size) | text


@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_has_the_same_probabilities_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    changes = with_vocabulary(changes | CHANGES.get(name, {}), demo_vocab_size())
    path = as_gguf(make_architecture(tmp_path / "mlx", model_type, **changes), tmp_path / "model.gguf")
    theirs = llama_cpp(path, PROMPT, [])
    model, tokens = loaded(gguf_directory(path)), list(PROMPT)
    for step, their_token in enumerate(theirs["tokens"]):
        logits = model(mx.array([tokens]))[0, -1].astype(mx.float32)
        logarithms = (logits - mx.logsumexp(logits)).tolist()
        if step == 0:
            for token, logarithm in theirs["first"].items():
                assert logarithms[int(token)] == pytest.approx(logarithm, abs=DIFFERENCE)
        second, best = sorted(logarithms)[-2:]
        tokens.append(logarithms.index(best))
        if tokens[-1] != their_token:  # it leaves out tokens that are no whole character
            assert best - second < CLEAR or step > 0
            break


@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_has_the_same_tokens_of_texts(name: str, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], _: Any) -> None:
        metadata |= {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 1}

    path = as_gguf(make_tiny_model(tmp_path / "m", "llama"), tmp_path / "model.gguf", change=change)
    own = Tokenizer.from_file(str(gguf_directory(path) / "tokenizer.json"))
    assert [own.encode(text).ids for text in TEXTS] == llama_cpp(path, [], TEXTS)["encoded"]
