"""Gives mlx-lm's models the fields of a config.json that transformers has written in another way since version 5.

Rotary fields are in `rope_parameters`, by layer type if the layers differ. Most of mlx-lm's models ignore this field:
they would take their default base and no scaling. The number of experts of Qwen3-MoE has another name, and Gemma 4 has
the heads of each layer without a window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"
GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def add_earlier_fields(config: dict[str, Any]) -> None:
    """Add the fields of earlier versions, in place, also to the text part of a multimodal config. Fields that are there
    stay as they are."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            found = rope_fields(part.get("rope_parameters")) | expert_fields(part) | global_fields(part)
            part |= {name: value for name, value in found.items() if part.get(name) is None}


def rope_fields(parameters: Any) -> dict[str, Any]:
    """The fields of earlier versions for `rope_parameters`."""
    if not isinstance(parameters, dict):
        return {}
    whole, local = parameters.get(FULL, parameters), parameters.get(SLIDING)
    if not isinstance(whole, dict):
        return {}
    found = {name: whole[name] for name in ("rope_theta", "partial_rotary_factor") if name in whole}
    if isinstance(local, dict) and "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    kind = whole.get("rope_type") or whole.get("type") or "default"
    found["rope_scaling"] = None if kind == "default" else {"type": kind, **whole}
    return found


def expert_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}


def global_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of Gemma 4 for `per_layer_config`, which says the same of each layer without a window."""
    layers = config.get("per_layer_config")
    first = next(iter(layers.values()), None) if isinstance(layers, dict) else None
    if not isinstance(first, dict) or not str(config.get("model_type")).startswith("gemma4"):
        return {}
    return {name: first[key] for key, name in GLOBAL.items() if key in first}
