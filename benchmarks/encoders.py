"""Embeddings of texts of mixed length over HTTP, beside padded batches of 32.

    python benchmarks/encoders.py [--texts 1000] [--layers 3] [--longest 512]

A BERT with random weights, as wide as MiniLM, embeds texts in one request. Their lengths are spread evenly on a
logarithmic scale from 3 tokens to the longest. The baseline is what a program does that pads: batches of 32 in their
order, each text as long as the longest of its batch. It uses the same operations, in this process: without HTTP,
without a tokenizer and without a mask for the padding. The figure to quote is the ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison.servers import free_port

from mlxpaged.cpu import blas  # before mlx: it loads the fast BLAS
from mlxpaged.models.encoders.encoder_model import EncoderModel
from mlxpaged.models.loader import load_embedding_model

# isort: split
import mlx.core as mx
from tokenizers import Tokenizer, models, pre_tokenizers, processors

BATCH, WIDTH, HEADS = 32, 384, 12
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = ["a", *(f"w{number}" for number in range(30_000))]


def write_model(directory: Path, layers: int, longest: int) -> None:
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "intermediate_size": 4 * WIDTH,
        "num_hidden_layers": layers,
        "max_position_embeddings": longest,
        "type_vocab_size": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    mx.random.seed(0)
    weights = {name: 0.05 * mx.random.normal(shape) for name, shape in shapes(config).items()}
    weights |= {name: array + 1 for name, array in weights.items() if name.endswith("LayerNorm.weight")}
    mx.save_safetensors(str(directory / "model.safetensors"), weights)
    modules = [{"type": f"models.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(("Transformer", "Pooling"))]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*SPECIAL, *WORDS])}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The weights of a BERT, by their published names."""
    found: dict[str, tuple[int, ...]] = {
        f"embeddings.{name}_embeddings.weight": (config[size], WIDTH)
        for name, size in (
            ("word", "vocab_size"),
            ("position", "max_position_embeddings"),
            ("token_type", "type_vocab_size"),
        )
    }
    norms, linear = ["embeddings.LayerNorm"], dict[str, tuple[int, ...]]()
    for index in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{index}"
        parts = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
        linear |= {f"{layer}.{part}": (WIDTH, WIDTH) for part in parts}
        linear |= {f"{layer}.intermediate.dense": (4 * WIDTH, WIDTH), f"{layer}.output.dense": (WIDTH, 4 * WIDTH)}
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name, shape in linear.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        found |= {f"{name}.weight": (WIDTH,), f"{name}.bias": (WIDTH,)}
    return found


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[int]:
    """The port of a server in a process of its own."""
    port = free_port()
    command = [sys.executable, "-m", "mlxpaged", "serve", str(directory), "--served-model-name", "vectors"]
    process = subprocess.Popen([*command, "--port", str(port), "--log-level", "warning"], stdout=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as to:
                to.request("GET", "/health")
                if to.getresponse().status == 200:
                    break
            assert process.poll() is None, "the server ended"
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def by_http(port: int, texts: Sequence[str]) -> tuple[float, Any]:
    """Seconds of one request, and the vectors."""
    body = json.dumps({"model": "vectors", "input": texts})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        seconds = time.perf_counter() - started
    assert response.status == 200, answer
    return seconds, np.array([each["embedding"] for each in answer["data"]])


def padded(model: EncoderModel, inputs: Sequence[list[int]]) -> float:
    """Seconds of batches in which each text has the tokens of the longest one."""
    started = time.perf_counter()
    for first in range(0, len(inputs), BATCH):
        batch = inputs[first : first + BATCH]
        longest = max(map(len, batch))
        texts = model.encoder.texts([[*tokens, *[0] * (longest - len(tokens))] for tokens in batch])
        mx.eval(model.vectors(model.encoder(texts), texts.ends))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest text")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.uniform(np.log(3), np.log(arguments.longest + 1), arguments.texts)).astype(int)
    texts = [" ".join(WORDS[number] for number in rng.integers(0, len(WORDS), length - 2)) for length in lengths]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory, arguments.layers, arguments.longest)
        model = load_embedding_model(name, None, arguments.longest)
        assert isinstance(model, EncoderModel)
        inputs = [model.tokenizer.encode(text) for text in texts]
        assert [len(tokens) for tokens in inputs] == lengths.tolist()
        with serving(directory) as port:
            by_http(port, texts[:BATCH])
            seconds, vectors = by_http(port, texts)
        padded(model, inputs[:1])
        baseline = padded(model, inputs)
        one = model.encoder.texts(inputs[:1])
        np.testing.assert_allclose(vectors[0], np.array(model.vectors(model.encoder(one), one.ends))[0], atol=1e-4)
    used = sum(lengths)
    full = sum(max(lengths[i : i + BATCH]) * len(lengths[i : i + BATCH]) for i in range(0, len(lengths), BATCH))
    print(f"{mx.default_device()}, BLAS: {blas.loaded or blas.REFERENCE}")
    print(f"{len(texts)} texts of {min(lengths)} to {max(lengths)} tokens, {used / len(texts):.0f} on average")
    print(f"over HTTP, without padding     {seconds:8.1f} s  {len(texts) / seconds:8.1f} texts/s  {used:9} tokens")
    print(
        f"padded batches of {BATCH}           {baseline:8.1f} s  {len(texts) / baseline:8.1f} texts/s  {full:9} tokens"
    )
    print(f"ratio                          {baseline / seconds:8.2f}")


if __name__ == "__main__":
    main()
