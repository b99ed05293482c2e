"""Adapters that are hostile or damaged: each is refused in one line and in time, or changes nothing but its answers."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.adapters.adapters import MAX_HEADER_BYTES, MAX_KEYS
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import LoadOptions, load_model
from mlxpaged.models.sources import local
from tests.models.test_hostile import SECONDS, change_header, fifo, link, sparse, write, write_bytes
from tests.support import make_adapter, make_tiny_model

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
Damage = Callable[[Path], None]
HUGE = 10**400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an adapter in it that can be loaded."""
    path = make_tiny_model(tmp_path_factory.mktemp("hostile") / "m", "qwen3")
    make_adapter(path, path / "adapter", 1, rank=4)
    return path


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """To be damaged."""
    return Path(shutil.copytree(model / "adapter", tmp_path / "adapter"))


def change(**fields: Any) -> Damage:
    """fields: of the config. `lora` changes fields of its part lora_parameters."""

    def damage(directory: Path) -> None:
        config = json.loads((directory / CONFIG).read_text())
        config["lora_parameters"] |= fields.get("lora", {})
        (directory / CONFIG).write_text(json.dumps(config | fields))

    return damage


def many_fields(directory: Path) -> None:
    change(**{str(i): i for i in range(400_000)})(directory)


def lora(**parameters: Any) -> Damage:
    return change(lora=parameters)


def size_of(num_bytes: int) -> bytes:
    """The size of a header, as a file of weights begins."""
    return num_bytes.to_bytes(8, "little")


def with_header(header: bytes) -> Damage:
    return write_bytes(WEIGHTS, size_of(len(header)) + header)


def many_tensors(directory: Path) -> None:
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = {f"model.layers.0.mlp.experts.{i}.gate_proj.lora_a": tensor for i in range(35_000)}
    with_header(json.dumps(header).encode())(directory)


def sparse_tensors(num_bytes: int, rank: int) -> Damage:
    """Weights of that many bytes, which take no room on the disk, for an adapter of that rank."""

    def damage(directory: Path) -> None:
        shape = [num_bytes // 4 // rank, rank]
        tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}
        with_header(json.dumps({"model.layers.0.self_attn.q_proj.lora_a": tensor}).encode())(directory)
        sparse(WEIGHTS, (directory / WEIGHTS).stat().st_size + num_bytes)(directory)
        lora(rank=rank)(directory)

    return damage


def without_tensors(*ends: str) -> Damage:
    """The weights without those whose names end so."""

    def damage(directory: Path) -> None:
        data = (directory / WEIGHTS).read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = {name: each for name, each in json.loads(data[8:end]).items() if not name.endswith(ends)}
        text = json.dumps(header).encode()
        (directory / WEIGHTS).write_bytes(size_of(len(text)) + text + data[end:])

    return damage


def both(*damages: Damage) -> Damage:
    def damage(directory: Path) -> None:
        for each in damages:
            each(directory)

    return damage


REFUSED: dict[str, tuple[Damage, str]] = {
    "a scale that is no number": (lora(scale=math.nan), "logits with it are not finite"),
    "an endless scale": (lora(scale=math.inf), "logits with it are not finite"),
    "a scale of a text": (lora(scale="2"), "Cannot perform multiplication"),
    "a scale of a list": (lora(scale=[2]), "Cannot perform multiplication"),
    "a huge scale": (lora(scale=HUGE), "."),
    "a huge rank": (lora(rank=10**12), "says rank 1000000000000, and"),
    "a rank beyond numbers": (lora(rank=HUGE), "says rank 10+"),
    "a negative rank": (lora(rank=-4), "says rank -4"),
    "a rank of a text": (lora(rank="4"), "says rank 4, and"),
    "a rank of a fraction": (lora(rank=4.0), "incompatible function arguments"),
    "a rank that is no number": (lora(rank=math.nan), "says rank nan"),
    "no rank": (lora(rank=None), "says rank None"),
    "a dropout of 5": (lora(dropout=5), r"not in \[0, 1\)"),
    "a text as keys": (lora(keys="q_proj"), "."),
    "a number as keys": (lora(keys=7), "not a list of at most 4,096 names"),
    "an object as keys": (lora(keys={"q_proj": 1}), "not a list of at most 4,096 names"),
    "keys of lists": (
        lora(keys=[[["q_proj"]]]),
        "not an adapter parameter in the model|no weights for any layer of the model",  # of mlx-lm 0.32, and 0.31
    ),
    "too many keys": (lora(keys=[""] * (MAX_KEYS + 1)), "not a list of at most 4,096 names"),
    "keys of all modules": (lora(keys=["", "model", "layers"]), "Can't convert layer"),
    "a count of layers that is no number": (change(num_layers=math.nan), "has no num_layers"),
    "a list of parameters": (change(lora_parameters=[]), "has no num_layers and lora_parameters"),
    "too many fields": (many_fields, r"has 400,0\d\d values; the limit is 320,000"),
    "deep config": (write(CONFIG, "[" * 10_000_000), "maximum recursion"),
    "a config that is a list": (write(CONFIG, "[]"), "is not an object"),
    "a config of a number": (write(CONFIG, "NaN"), "is not an object"),
    "a config that is no text": (write_bytes(CONFIG, b"\xff" * 99), "cannot be read"),
    "a config of a terabyte": (sparse(CONFIG, 2**40), "such a file has at most 16.8 MB"),
    "a config that is a FIFO": (fifo(CONFIG), "has no adapter_config.json"),
    "weights that are a FIFO": (fifo(WEIGHTS), "has no adapters.safetensors"),
    "weights that are a device": (link(WEIGHTS, "/dev/zero"), "has no adapters.safetensors"),
    "empty weights": (write_bytes(WEIGHTS, b""), "is not a safetensors file, or is cut short"),
    "no weights": (with_header(b"{}"), "has no weights for any layer"),
    "a header of 100 MB": (
        both(write_bytes(WEIGHTS, size_of(10**8)), sparse(WEIGHTS, 10**8 + 8)),
        r"its adapters\.safetensors has 100,000,000 bytes, above 1,048,576",
    ),
    "a header that ends after the file": (write_bytes(WEIGHTS, size_of(2**40)), "or is cut short"),
    "a header of 35,000 tensors": (many_tensors, "has 3,803,890 bytes, above 1,048,576"),
    "a deep header": (with_header(b"[" * MAX_HEADER_BYTES), "its header is damaged"),
    "weights of a terabyte": (sparse(WEIGHTS, 2**40), "its adapters 1099.5 GB, but only"),
    "a tensor of a terabyte": (sparse_tensors(2**40, 2**32), "its adapters 1099.5 GB, but only"),
    "offsets after the file": (
        change_header(WEIGHTS, shape=[1, 256], data_offsets=[2**40, 2**40 + 1024]),
        "is cut short",
    ),
    "negative offsets": (change_header(WEIGHTS, data_offsets=[-1024, 0]), "has a bad shape"),
    "reversed offsets": (change_header(WEIGHTS, data_offsets=[1024, 0]), "do not fit its shape"),
    "a huge shape": (change_header(WEIGHTS, shape=[2**32, 2**32]), "do not fit its shape"),
    "a negative shape": (change_header(WEIGHTS, shape=[-1, -1]), "has a bad shape"),
    "a shape of a text": (change_header(WEIGHTS, shape="x"), "has a bad shape"),
    "another shape": (change_header(WEIGHTS, shape=[2, 128]), "shape"),
    "a shape of many dimensions": (change_header(WEIGHTS, shape=[1] * 100_000 + [256]), "."),
    "an unknown type": (change_header(WEIGHTS, dtype="X"), "."),
    "weights without a rank": (both(lora(rank=HUGE), without_tensors("lora_a")), "."),
    "no weights of a rank": (both(lora(rank=10**6), without_tensors("lora_a", "lora_b")), "has no weights for any"),
    "layers that are half there": (without_tensors("0.self_attn.q_proj.lora_a"), "has no .*0.self_attn.q_proj.lora_a"),
}


def load(model: Path, adapter: Path) -> None:
    load_model(str(model), LoadOptions(adapters=[AdapterPath("mine", adapter)]))


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_adapter_is_refused_with_the_reason_in_one_line(model: Path, adapter: Path, name: str) -> None:
    damage, reason = REFUSED[name]
    damage(adapter)
    begin = time.process_time()
    with pytest.raises(UnsupportedModelError) as error:
        load(model, adapter)
    assert time.process_time() - begin < SECONDS
    assert re.search(reason, message := str(error.value))
    assert "\n" not in message
    assert len(message) < 1000


HARMLESS = {
    "layers without end": change(num_layers=HUGE),
    "fewer layers than none": change(num_layers=-1),
    "fields that Python has": change(self=1, __class__=2, __dict__=3),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_is_loaded(model: Path, adapter: Path, name: str) -> None:
    HARMLESS[name](adapter)
    load(model, adapter)


def test_layers_that_the_file_does_not_have_stay_as_they_are(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm makes weights for them, as large as the rank says: they are never computed."""

    uniform = mx.random.uniform

    def unusable(*args: Any, **options: Any) -> mx.array:
        """Only the caller that has no key is mlx-lm."""
        return uniform(*args, **options) if "key" in options else mx.full(options["shape"], mx.nan)

    monkeypatch.setattr(mx.random, "uniform", unusable)
    without_tensors("0.self_attn.q_proj.lora_a", "0.self_attn.q_proj.lora_b")(adapter)
    load(model, adapter)


def test_adapters_that_do_not_fit_beside_the_weights_are_refused(
    model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, own = (path.stat().st_size for path in (model / "model.safetensors", adapter / WEIGHTS))
    for free, fits in ((weights + own, True), (weights + own - 1, False)):
        monkeypatch.setattr(local, "free_device_memory", lambda free=free: free)
        if fits:
            load(model, adapter)
        else:
            with pytest.raises(UnsupportedModelError, match=r"its weights take .* and its adapters .* are free"):
                load(model, adapter)
