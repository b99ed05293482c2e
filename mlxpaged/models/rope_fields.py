"""Gives mlx-lm's models the rotary fields of a config.json that transformers has written since version 5.

These versions have them in `rope_parameters`, by layer type if the layers differ. Most of mlx-lm's models ignore this
field: they would take their default base and no scaling.
"""

from __future__ import annotations

from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"


def add_rope_fields(config: dict[str, Any]) -> None:
    """Add the fields of earlier versions, in place, also to the text part of a multimodal config. Fields that are there
    stay as they are."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            found = rope_fields(part.get("rope_parameters"))
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
