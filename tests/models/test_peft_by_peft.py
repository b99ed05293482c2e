"""Adapters that PEFT itself has saved give the logits of PEFT's own model. It needs torch: `make test-peft`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.models.adapters import adapters, peft
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.loader import LoadOptions, load_model
from tests.support import make_tiny_model

pytestmark = pytest.mark.peft

FORMS: dict[str, dict[str, Any]] = {
    "alpha / r": {},
    "alpha / sqrt(r)": {"use_rslora": True},
    "all linear layers": {"target_modules": "all-linear"},
    "the output head": {"target_modules": ["lm_head", "o_proj"]},
    "layers": {"layers_to_transform": [1]},
    "ranks and alphas": {
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 3, r".*\.0\.self_attn\.v_proj": 5},
        "alpha_pattern": {"^model.layers.0.*": 7, "q_proj": 9, "_proj": 1000},
    },
    "ranks and alphas under the root": {
        "rank_pattern": {"(k|v)_proj": 2},
        "alpha_pattern": {"self_attn.(q|v)_proj": 5},
        "use_rslora": True,
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_what_peft_saves_gives_the_logits_of_peft(tmp_path: Path, form: str) -> None:
    """torch reads the same weights of the model."""
    torch, package = pytest.importorskip("torch"), pytest.importorskip("peft")
    import transformers

    path = make_tiny_model(tmp_path / "m", "qwen3", tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"])
    base = transformers.AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
    fields = {"target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"]} | FORMS[form]
    torch.manual_seed(1)
    wrapped = package.get_peft_model(base, package.LoraConfig(r=4, lora_alpha=12, task_type="CAUSAL_LM", **fields))
    for name, weights in wrapped.named_parameters():
        if ".lora_" in name:
            torch.nn.init.normal_(weights, std=0.1)
    wrapped.save_pretrained(str(tmp_path / "adapter"))
    tokens = [[17, 40, 99, 3, 120, 77, 31, 200]]
    with torch.no_grad():
        expected = wrapped.eval()(torch.tensor(tokens)).logits.numpy()
        merged = wrapped.merge_and_unload()(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(expected, merged, atol=1e-3)
    plain, _ = load_plain_model(path)
    without = np.array(plain(mx.array(tokens)))
    peft.attach(plain, tmp_path / "adapter", adapters.MAX_HEADER_BYTES)
    plain.eval()
    np.testing.assert_allclose(np.array(plain(mx.array(tokens))), expected, atol=1e-3)
    assert np.abs(without - expected).max() > 0.1
    load_model(str(path), LoadOptions(adapters=[AdapterPath("mine", tmp_path / "adapter")]))
