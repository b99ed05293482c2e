"""llama.cpp computes what this server computes of the same GGUF file: `make test-gguf`."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tokenizers import Tokenizer

from mlxpaged.models.sources.gguf.blocks import AGAIN
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.gguf.file import CODE_BOOKS, read_gguf
from mlxpaged.models.sources.gguf.tokenizer import SPLITS
from tests.models.architectures import make_architecture
from tests.models.gguf_blocks import VALUES, values
from tests.models.gguf_files import TYPES, Stored
from tests.models.gguf_models import as_gguf
from tests.models.test_gguf import MODELS, greedy, in_float32, in_memory, loaded, put_values
from tests.support import demo_vocab_size, make_tiny_model

pytestmark = pytest.mark.llamacpp

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

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
MIXTURE = "Q4_K_M"
"""Q4_K, and Q6_K for the output head and, in half of the layers, for values and down projections."""
LARGER = ("output.weight", "blk.1.attn_v.weight", "blk.1.ffn_down.weight")


def run_with_llama_cpp(program: str, asked: dict[str, Any]) -> str:
    command = [os.environ["MLXPAGED_LLAMACPP"], str(Path(__file__).with_name(program))]
    ended = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


def write_with_llama_cpp(file: Path, made: dict[Path, dict[str, str]]) -> None:
    """Writes other files of a file. made: the types of tensors that get another one."""
    numbers = {kind: number for kind, (number, _, _) in TYPES.items()}
    asked = {"file": str(file), "made": {str(path): kinds for path, kinds in made.items()}, "numbers": numbers}
    run_with_llama_cpp("writer.py", asked)


def llama_cpp(file: Path, prompt: list[int], texts: list[str]) -> dict[str, Any]:
    asked = {"file": str(file), "prompt": prompt, "num_tokens": 4, "texts": texts}
    found: dict[str, Any] = json.loads(run_with_llama_cpp("program.py", asked).splitlines()[-1])
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
    directory, path = make_architecture(tmp_path / "mlx", model_type, **changes), tmp_path / "model.gguf"
    write_with_llama_cpp(as_gguf(directory, tmp_path / "own.gguf"), {path: {}})
    theirs = llama_cpp(path, PROMPT, [])
    model, tokens = loaded(gguf_directory(path)), list(PROMPT)
    assert greedy(model) == greedy(loaded(directory))
    tokenizer = Tokenizer.from_file(str(gguf_directory(path) / "tokenizer.json"))
    assert theirs["steps"]
    for their_token, most_probable in theirs["steps"]:
        logits = model(mx.array([tokens]))[0, -1].astype(mx.float32)
        logarithms = (logits - mx.logsumexp(logits)).tolist()
        second, best = sorted(logarithms)[-2:]
        tokens.append(logarithms.index(best))
        if tokens[-1] != their_token:  # it leaves out tokens that are no whole character
            assert best - second < CLEAR or "\ufffd" in tokenizer.decode(tokens[-1:])
            break
        for token, logarithm in most_probable.items():
            assert logarithms[int(token)] == pytest.approx(logarithm, abs=DIFFERENCE)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and files of it, which llama.cpp's own code has quantized and written: one in each type,
    and one in a mixture of them."""
    path = tmp_path_factory.mktemp("written")
    sizes = with_vocabulary(SIZES | {"tie_word_embeddings": False}, demo_vocab_size())
    file = as_gguf(make_architecture(path / "mlx", "qwen3", **sizes), path / "F32.gguf")
    names = [name for name, tensor in read_gguf(file).tensors.items() if len(tensor.shape) > 1]
    kinds = {kind: dict.fromkeys(names, kind) for kind in TYPES if kind != "F32"}
    kinds[MIXTURE] = dict.fromkeys(names, "Q4_K") | dict.fromkeys(LARGER, "Q6_K")
    write_with_llama_cpp(file, {path / f"{name}.gguf": each for name, each in kinds.items()})
    return path


@pytest.mark.parametrize("name", [*VALUES, *CODE_BOOKS, "F16", "BF16", MIXTURE])
def test_files_that_llama_cpp_has_written_give_the_tokens_of_the_mlx_directory_with_the_same_values(
    name: str, written: Path, tmp_path: Path
) -> None:
    path = written / f"{name}.gguf"
    tensors, theirs = read_gguf(path).tensors, read_gguf(written / f"{name}.gguf.values").tensors
    found, kinds = {}, set()
    for tensor in tensors.values():
        kind, rows = tensor.type.name, math.prod(tensor.shape[:-1])
        same = theirs[tensor.name].read(0, rows).view(np.float32).reshape(tensor.shape)
        if kind in CODE_BOOKS:
            blocks = mx.array(tensor.read(0, rows)).reshape(rows, -1, tensor.type.nbytes)
            np.testing.assert_allclose(np.array(AGAIN[kind][1](blocks)).reshape(tensor.shape), same, rtol=1e-6)
        elif kind in VALUES:
            np.testing.assert_allclose(values(Stored(kind, tensor.shape, tensor.read(0, rows))), same, rtol=1e-6)
        found[tensor.name] = in_memory(tensor, same)
        kinds.add(kind)
    assert kinds - {"F32"} == ({"Q4_K", "Q6_K"} if name == MIXTURE else {name})
    put_values(shutil.copytree(written / "mlx", tmp_path / "mlx"), found)
    own, expected = in_float32(path), loaded(tmp_path / "mlx")
    assert mx.allclose(own(mx.array([PROMPT])), expected(mx.array([PROMPT])), rtol=1e-4, atol=1e-4)
    assert greedy(own) == greedy(expected)


@pytest.mark.parametrize("name", SPLITS)
def test_llama_cpp_has_the_same_tokens_of_texts(name: str, tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], _: Any) -> None:
        metadata |= {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 1}

    path = as_gguf(make_tiny_model(tmp_path / "m", "llama"), tmp_path / "model.gguf", change=change)
    own = Tokenizer.from_file(str(gguf_directory(path) / "tokenizer.json"))
    assert [own.encode(text).ids for text in TEXTS] == llama_cpp(path, [], TEXTS)["encoded"]
