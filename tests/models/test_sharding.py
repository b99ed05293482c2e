"""A model is cut into equal shares, or refused with the reason and with what is possible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as load_weights

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.weights import read_weights
from mlxpaged.models.loader import load_model
from mlxpaged.models.sharding import Share, shard
from tests.models.architectures import QWEN3_5, linear_attention, make_architecture, nested
from tests.support import make_tiny_model, quantize, since_mlx_lm_0_32


def load(path: Path, count: int) -> None:
    group: Any = Share(count - 1, count)  # the model is refused before the ranks have to talk
    load_model(str(path), group=group)


@since_mlx_lm_0_32
def test_a_model_that_cannot_be_cut_is_refused_with_those_that_can(tmp_path: Path) -> None:
    path = make_architecture(tmp_path / "m", "cohere2")
    with pytest.raises(UnsupportedModelError, match=r"cannot be cut .* llama, .*qwen3_next") as refusal:
        load(path, 2)
    assert "cohere2" not in str(refusal.value).replace(str(path), "")


@pytest.mark.parametrize(
    ("kind", "config", "bits", "count", "reason"),
    [
        ("qwen3", {}, None, 4, "n_kv_heads is 2 .*num_key_value_heads 2.*; possible are 2$"),
        ("qwen3", {"num_key_value_heads": 1}, None, 2, "n_kv_heads is 1 .*; no number of ranks is possible$"),
        ("qwen3", {"num_key_value_heads": 4}, 4, 4, r"group size 32.*quantized in groups of 32\); no number of ranks"),
        pytest.param(
            *("qwen3_5", {}, None, 3, "group size 3 must divide vocab_size 256 .*; possible are 2$"),
            marks=since_mlx_lm_0_32,
        ),
        ("qwen3_next", linear_attention(heads=4), None, 3, "3 splits .*linear_num_key_heads 4.*; possible are 2, 4$"),
        ("bailing_hybrid", {}, None, 4, "groups is 2 .*; possible are 2$"),
        ("deepseek_v3", {}, None, 8, "num_heads is 4 .*; possible are 2, 4$"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named_with_the_numbers_of_ranks_that_can(
    kind: str, config: dict[str, Any], bits: int | None, count: int, reason: str, tmp_path: Path
) -> None:
    path = make_architecture(tmp_path / "m", kind, **config)
    if bits is not None:
        quantize(path, bits)
    with pytest.raises(UnsupportedModelError, match=f"cannot be cut among {count} ranks: .*{reason}"):
        load(path, count)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_next"])
def test_heads_of_keys_that_several_ranks_have_are_no_reason_to_refuse(kind: str, tmp_path: Path) -> None:
    """Qwen3.5 and Qwen3-Next have few: each rank has one of them."""
    sizes = linear_attention(heads=4)
    config = nested(model_type="qwen3_5_text", **QWEN3_5 | sizes) if kind == "qwen3_5" else sizes
    path = make_architecture(tmp_path / "m", kind, **config)
    model, config = load_weights(path, lazy=True)
    group: Any = Share(3, 4)
    shard(model, config, group, lambda: model)


@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_rank_never_has_more_than_its_share_in_memory(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 2048, "kv_lora_rank": 256, "qk_nope_head_dim": 128}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    path = make_tiny_model(tmp_path / "m", kind, **DEEPSEEK if kind == "deepseek_v3" else {}, **(sizes | heads))
    model, config = load_weights(path, lazy=True)
    group: Any = Share(1, 4)
    whole = sum(array.nbytes for _, array in leaves(model))
    shard(model, config, group, lambda: model)
    share = sum(array.nbytes for _, array in leaves(model))
    assert share < 0.45 * whole
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    read_weights(model, lambda done, total: None, 1)
    largest = 4 * 2**20
    assert mx.get_peak_memory() - before < share + largest
    assert mx.get_active_memory() - before < 1.05 * share


DEEPSEEK = {"num_hidden_layers": 3, "q_lora_rank": 24, "qk_rope_head_dim": 8, "v_head_dim": 128}


def leaves(model: Any) -> Any:
    return tree_flatten(model.parameters())
