"""GGUF files compute what the MLX directories with the same values do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxpaged.cpu.float32 import Storage
from mlxpaged.models.encoders.embedding import weight_bytes
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.sources.gguf.blocks import AGAIN, Errors, arrays
from mlxpaged.models.sources.gguf.config import config_of
from mlxpaged.models.sources.gguf.directory import gguf_directory
from mlxpaged.models.sources.gguf.file import Tensor, read_gguf
from mlxpaged.models.sources.model_files import ModelFiles
from tests.models.architectures import ARCHITECTURES, FULL, LLAMA3, SLIDING, make_architecture
from tests.models.gguf_blocks import VALUES, random_tensor, values
from tests.models.gguf_files import Stored, plain
from tests.models.gguf_models import as_gguf, tensor_name

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]

LONG_FACTORS = [1.0 + 0.5 * i for i in range(8)]
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
GEMMA4_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}
QWEN35 = {"rope_parameters": {"type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True}),
    "gemma4": ("gemma4_text", {"rope_parameters": GEMMA4_ROPE}),
    "gemma4 with shared layers": (
        "gemma4_text",
        {
            "rope_parameters": GEMMA4_ROPE,
            "num_kv_shared_layers": 2,
            "enable_moe_block": False,
            "num_experts": None,
            "top_k_experts": None,
            "attention_k_eq_v": False,
            "num_global_key_value_heads": None,
        },
    ),
    "glm4": ("glm4", {}),
    "gpt_oss": ("gpt_oss", {}),
    "granite": ("granite", {}),
    "lfm2": ("lfm2", {"conv_bias": False}),
    "llama": ("llama", {"layer_types": None, "sliding_window": None}),
    "llama 3.1": (
        "llama",
        {"layer_types": None, "sliding_window": None, "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    ),
    "ministral3": ("ministral3", {"layer_types": [FULL, FULL], "sliding_window": None, "rope_parameters": YARN}),
    "mixtral": ("mixtral", {}),
    "phi3": ("phi3", {}),
    "phi3 with long contexts": (
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_scaling": {"type": "longrope", "long_factor": LONG_FACTORS, "short_factor": [1.0] * 8},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_5": ("qwen3_5", {"text_config": ARCHITECTURES["qwen3_5"].config["text_config"] | QWEN35}),
    "qwen3_5_moe": ("qwen3_5_moe", {"text_config": ARCHITECTURES["qwen3_5_moe"].config["text_config"] | QWEN35}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": []}),
}


DTYPES = {"F16": mx.float16, "BF16": mx.bfloat16}


def loaded(directory: Path) -> Any:
    model, _ = ModelFiles(directory).load(lambda done, total: None)
    return model


def greedy(model: Any, count: int = 8) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(mx.array([tokens]))[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_computes_what_the_mlx_directory_does(name: str, tmp_path: Path) -> None:
    model_type, changes = MODELS[name]
    directory = make_architecture(tmp_path / "mlx", model_type, **changes)
    path = as_gguf(directory, tmp_path / "model.gguf")
    own, theirs = loaded(gguf_directory(path)), loaded(directory)
    assert mx.allclose(own(mx.array([PROMPT])), theirs(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)
    assert greedy(own) == greedy(theirs)


NEUTRAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "rope.scaling.type": "none",
}
SCALED = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}


@pytest.mark.parametrize(
    ("key", "value", "others"),
    [
        ("rope.scaling.attn_factor", 2.0, SCALED),
        ("rope.scaling.attn_factor", 2.0, {}),
        ("rope.scaling.attn_factor", 0.5, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("rope.scaling.yarn_attn_factor", 2.0, SCALED),
        ("rope.scaling.yarn_ext_factor", 0.0, SCALED),
        ("rope.scaling.yarn_ext_factor", 1.0, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("rope.scaling.yarn_log_multiplier", 0.1, SCALED),
        ("rope.scaling.type", "longrope", {}),
    ],
)
def test_a_scaling_that_the_rotations_do_not_have_is_refused(
    key: str, value: Any, others: dict[str, Any], tmp_path: Path
) -> None:
    """Each changes what the model says. Before, it was read over."""

    def scaled(**more: Any) -> Any:
        def change(metadata: dict[str, Any], _: dict[str, Stored]) -> None:
            metadata.update({f"llama.{name}": each for name, each in {**others, **more}.items()})

        return change

    directory = make_architecture(tmp_path / "mlx", "llama", layer_types=None, sliding_window=None)
    gguf_directory(as_gguf(directory, tmp_path / "neutral.gguf", change=scaled(**{key: NEUTRAL[key]})))
    with pytest.raises(UnsupportedModelError, match=f"its key llama.{key} is {value!r}"):
        gguf_directory(as_gguf(directory, tmp_path / "model.gguf", change=scaled(**{key: value})))


def test_a_long_context_with_a_factor_of_its_own_is_refused(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], _: dict[str, Stored]) -> None:
        metadata["phi3.rope.scaling.attn_factor"] *= 1.1

    model_type, changes = MODELS["phi3 with long contexts"]
    directory = make_architecture(tmp_path / "mlx", model_type, **changes)
    with pytest.raises(UnsupportedModelError, match=r"its key phi3.rope.scaling.attn_factor"):
        gguf_directory(as_gguf(directory, tmp_path / "model.gguf", change=change))


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_file_that_names_no_kind_of_scaling_has_a_linear_one(key: str, tmp_path: Path) -> None:
    """Such as those of Llama 2 and Vicuna with longer contexts of 2023."""

    def scale(metadata: dict[str, Any], _: dict[str, Stored]) -> None:
        metadata[f"llama.{key}"] = 4.0

    same = {"layer_types": None, "sliding_window": None}
    scaling = {"type": "linear", "factor": 4.0}
    directory = make_architecture(tmp_path / "mlx", "llama", **same, rope_scaling=scaling)
    unscaled = make_architecture(tmp_path / "unscaled", "llama", **same)
    own = loaded(gguf_directory(as_gguf(unscaled, tmp_path / "model.gguf", change=scale)))
    assert mx.allclose(own(mx.array([PROMPT])), loaded(directory)(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sliding", [(True, False) * 8, (True, False, False, True) * 4])
def test_a_file_may_say_of_each_layer_whether_it_has_a_window(sliding: tuple[bool, ...], tmp_path: Path) -> None:
    """Such as those of Ollama's Gemma 3."""
    directory = make_architecture(tmp_path / "mlx", "gemma3_text", tie_word_embeddings=True, sliding_window_pattern=2)
    count = json.loads((directory / "config.json").read_text())["num_hidden_layers"]

    def list_layers(metadata: dict[str, Any], _: dict[str, Stored]) -> None:
        metadata["gemma3.attention.sliding_window_pattern"] = list(sliding[:count])

    path = as_gguf(directory, tmp_path / "model.gguf", change=list_layers)
    if sliding[2]:
        own = loaded(gguf_directory(path))
        assert mx.allclose(own(mx.array([PROMPT])), loaded(directory)(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(UnsupportedModelError, match="sliding_window_pattern"):
            gguf_directory(path)


def test_gate_and_up_projections_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """Gemma 4's files have them so."""

    def fuse(_: dict[str, Any], tensors: dict[str, Stored]) -> None:
        for name in [name for name in tensors if "ffn_gate_exps" in name]:
            gate, up = (tensors.pop(name.replace("gate", part)) for part in ("gate", "up"))
            experts, size, columns = gate.shape
            arrays = [np.frombuffer(each.data, np.float32).reshape(gate.shape) for each in (gate, up)]
            tensors[name.replace("gate", "gate_up")] = plain(np.concatenate(arrays, axis=1))
            assert tensors[name.replace("gate", "gate_up")].shape == (experts, 2 * size, columns)

    directory = make_architecture(tmp_path / "mlx", "gemma4_text", rope_parameters=GEMMA4_ROPE)
    own = loaded(gguf_directory(as_gguf(directory, tmp_path / "model.gguf", change=fuse)))
    assert mx.allclose(own(mx.array([PROMPT])), loaded(directory)(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_the_gate_of_a_shared_expert_may_be_a_vector(dimensions: int, tmp_path: Path) -> None:
    """llama.cpp's conversion writes a matrix of one row, and what it quantizes has a vector."""

    def flatten(_: dict[str, Any], tensors: dict[str, Stored]) -> None:
        gates = [tensor for name, tensor in tensors.items() if "ffn_gate_inp_shexp" in name]
        assert gates
        for gate in gates:
            gate.shape = gate.shape[-dimensions:]

    config = {"text_config": ARCHITECTURES["qwen3_5_moe"].config["text_config"] | QWEN35}
    directory = make_architecture(tmp_path / "mlx", "qwen3_5_moe", **config)
    own = loaded(gguf_directory(as_gguf(directory, tmp_path / "model.gguf", change=flatten)))
    assert mx.allclose(own(mx.array([PROMPT])), loaded(directory)(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)


def test_layers_of_a_draft_head_are_left_out(tmp_path: Path) -> None:
    def add(metadata: dict[str, Any], tensors: dict[str, Stored]) -> None:
        layers = metadata["qwen35.block_count"]
        metadata |= {"qwen35.block_count": layers + 1, "qwen35.nextn_predict_layers": 1}
        tensors[f"blk.{layers}.nextn.eh_proj.weight"] = plain(np.zeros((64, 128)))

    config = {"text_config": ARCHITECTURES["qwen3_5"].config["text_config"] | QWEN35}
    directory = make_architecture(tmp_path / "mlx", "qwen3_5", **config)
    own = loaded(gguf_directory(as_gguf(directory, tmp_path / "model.gguf", change=add)))
    assert mx.allclose(own(mx.array([PROMPT])), loaded(directory)(mx.array([PROMPT])), rtol=1e-5, atol=1e-5)


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    directory = make_architecture(tmp_path / "mlx", "qwen3")
    extra = {"blk.0.unheard.weight": plain(np.zeros(8))}
    path = as_gguf(directory, tmp_path / "model.gguf", change=lambda _, tensors: tensors.update(extra))
    with pytest.raises(UnsupportedModelError, match=r"it has the tensor blk\.0\.unheard\.weight, which is not known"):
        gguf_directory(path)


def in_float32(path: Path) -> Any:
    """The model of a file, with scales in float32: half types round in another order."""
    made = gguf_directory(path)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return loaded(made)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_of_every_architecture_are_put_in_order_without_unpacking(name: str, tmp_path: Path) -> None:
    """Rows and heads in another order, experts, fused projections: with the numbers as float32, the test above has
    shown the same."""
    model_type, changes = MODELS[name]
    if "text_config" in changes:
        changes = {"text_config": changes["text_config"] | {"linear_value_head_dim": 32}}
    directory = make_architecture(tmp_path / "mlx", model_type, **changes)
    kinds = {}

    def packed(tensor: str, array: Any) -> Stored:
        if array.ndim < 2 or array.shape[-1] % 32 or tensor.endswith(".bias"):
            return plain(array)
        kinds[tensor] = "MXFP4" if "exps" in tensor else "Q8_0"
        return random_tensor(kinds[tensor], array.shape, len(kinds))

    def unpacked(tensor: str, array: Any) -> Stored:
        if tensor not in kinds:
            return plain(array)
        number = list(kinds).index(tensor) + 1
        return plain(values(random_tensor(kinds[tensor], array.shape, number)))

    path = as_gguf(directory, tmp_path / "packed.gguf", packed)
    own, files = in_float32(path), ModelFiles(gguf_directory(path))
    theirs = loaded(gguf_directory(as_gguf(directory, tmp_path / "unpacked.gguf", unpacked)))
    assert mx.allclose(own(mx.array([PROMPT])), theirs(mx.array([PROMPT])), rtol=1e-3, atol=1e-4)
    assert weight_bytes(own) < 0.5 * weight_bytes(theirs)
    dense, _ = files.load(lambda done, total: None, Storage.DENSE)  # as a CPU computes it
    assert mx.allclose(dense(mx.array([PROMPT])), theirs(mx.array([PROMPT])), rtol=1e-4, atol=1e-5)
    arrays_of_dense: Any = tree_flatten(dense.parameters())
    assert {array.dtype for _, array in arrays_of_dense} <= {mx.float32, mx.int32}
    assert files.gguf_sizes is not None
    assert files.gguf_sizes.model < files.gguf_sizes.scales < files.gguf_sizes.dense


def in_memory(tensor: Tensor, found: Any) -> mx.array:
    """What the values of a tensor become: those of some types are quantized again, which test_gguf_blocks.py tests."""
    kind = tensor.type.name
    if kind not in AGAIN:
        return mx.array(found).astype(DTYPES.get(kind, mx.float32))
    parts = arrays(tensor, mx.float32, Errors())
    return mx.dequantize(parts["weight"], parts["scales"], parts["biases"], 32, AGAIN[kind][0])


def put_values(directory: Path, own_values: dict[str, Any]) -> None:
    """Gives weights of a Qwen 3 other values, by their names in a GGUF file."""
    weights: Any = mx.load(str(directory / "model.safetensors"))
    same = {name: own_values.get(tensor_name(name, "qwen3"), array) for name, array in weights.items()}
    same = {name: array.astype(mx.float32) for name, array in same.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), same)


@pytest.mark.parametrize("kind", [*VALUES, "F16", "BF16"])
def test_each_type_gives_the_tokens_of_the_mlx_directory_with_the_same_values(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    directory = make_architecture(tmp_path / "mlx", "qwen3", tie_word_embeddings=True, **sizes)
    own_values: dict[str, Any] = {}

    def store(name: str, array: Any) -> Stored:
        if name not in ("token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"):
            return plain(array)
        stored = random_tensor(kind, array.shape, len(name)) if kind in VALUES else plain(array, kind)
        own_values[name] = values(stored) if kind in VALUES else array
        return stored

    path = as_gguf(directory, tmp_path / "model.gguf", store)
    tensors = read_gguf(path).tensors
    put_values(directory, {name: in_memory(tensors[name], found) for name, found in own_values.items()})
    config = json.loads((gguf_directory(path) / "config.json").read_text())
    assert config["dtype"] == ("float16" if kind == "F16" else "bfloat16")
    with caplog.at_level("INFO", logger="mlxpaged"):
        own = in_float32(path)
    said = re.findall(r"tensors of the type (\w+) are stored in (\d) bits: relative error 0\.[01]", caplog.text)
    assert said == ([(kind, str(AGAIN[kind][0]))] if kind in AGAIN else [])
    theirs = loaded(directory)
    assert mx.allclose(own(mx.array([PROMPT])), theirs(mx.array([PROMPT])), rtol=1e-3, atol=1e-3)
    assert greedy(own) == greedy(theirs)


def test_weights_of_a_q4_k_m_file_take_as_much_memory_as_the_file_and_a_tenth(tmp_path: Path) -> None:
    """llama.cpp's mixture: Q6_K for the embedding and half of the values and down projections, Q4_K for the rest."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128, "num_hidden_layers": 2}
    directory = make_architecture(tmp_path / "mlx", "llama", layer_types=None, sliding_window=None, **sizes)

    def store(name: str, array: Any) -> Stored:
        if array.ndim < 2:
            return plain(array)
        large = name == "output.weight" or name in ("blk.0.attn_v.weight", "blk.0.ffn_down.weight")
        return random_tensor("Q6_K" if large else "Q4_K", array.shape)

    path = as_gguf(directory, tmp_path / "model.gguf", store)
    model = loaded(gguf_directory(path))
    assert weight_bytes(model) < 1.1 * path.stat().st_size
    assert model.model.layers[0].self_attn.q_proj.bits == 4
    assert model.model.layers[0].self_attn.v_proj.bits == 6


@pytest.mark.parametrize(
    ("architecture", "way"), [("bert", "serve its repository with safetensors"), ("odd", "may be supported as safeten")]
)
def test_an_architecture_that_is_not_supported_is_refused_with_a_way_out(architecture: str, way: str) -> None:
    file = SimpleNamespace(metadata={"general.architecture": architecture}, tensors={})
    with pytest.raises(UnsupportedModelError, match=f"its architecture is '{architecture}'.*{way}"):
        config_of(file)  # type: ignore[arg-type]
