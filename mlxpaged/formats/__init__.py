"""The formats in which models write tool calls and thoughts. Nothing here imports mlx."""

from __future__ import annotations

from collections.abc import Container

from mlxpaged.formats.deepseek import DEEPSEEK_V3
from mlxpaged.formats.dsml import DEEPSEEK_V32
from mlxpaged.formats.format import Format, new_call_id
from mlxpaged.formats.gemma import FUNCTION_GEMMA, GEMMA_4
from mlxpaged.formats.glm import GLM, LONGCAT
from mlxpaged.formats.harmony import HARMONY
from mlxpaged.formats.hermes import HERMES
from mlxpaged.formats.hunyuan import HUNYUAN, HUNYUAN_3
from mlxpaged.formats.json_lists import APERTUS, COMMAND_R, GRANITE_3, NEMOTRON_NANO, PHI_4_MINI
from mlxpaged.formats.kimi import KIMI_K2, KIMI_K3
from mlxpaged.formats.llama import LLAMA_3, LLAMA_4, LLAMA_4_JSON
from mlxpaged.formats.minicpm import MINICPM5
from mlxpaged.formats.minimax import MINIMAX_M2, MINIMAX_M3
from mlxpaged.formats.mistral import MISTRAL
from mlxpaged.formats.muse import MUSE_SPARK
from mlxpaged.formats.pythonic import LFM2
from mlxpaged.formats.qwen3_coder import QWEN3_CODER
from mlxpaged.formats.seed import SEED_OSS
from mlxpaged.formats.source import NotACall, Reading, Source
from mlxpaged.formats.thoughts import THOUGHTS, ThoughtTags, thought_tags
from mlxpaged.formats.tools import Call, Tools

__all__ = [
    "FORMATS",
    "HARMONY",
    "HERMES",
    "THOUGHTS",
    "Call",
    "Format",
    "NotACall",
    "Reading",
    "Source",
    "ThoughtTags",
    "Tools",
    "format_of",
    "new_call_id",
    "thought_tags",
]

FORMATS = {
    each.name: each
    for each in (
        *(HARMONY, MINIMAX_M3, MINIMAX_M2, GEMMA_4, FUNCTION_GEMMA, LONGCAT, HUNYUAN_3, HUNYUAN, GLM, LFM2, SEED_OSS),
        *(DEEPSEEK_V32, QWEN3_CODER, KIMI_K2, KIMI_K3, MINICPM5, MUSE_SPARK, DEEPSEEK_V3, PHI_4_MINI, GRANITE_3),
        *(NEMOTRON_NANO, COMMAND_R, APERTUS, MISTRAL, HERMES, LLAMA_4_JSON, LLAMA_4, LLAMA_3),
    )
}
"""The formats by name, in the order in which they are searched."""


def format_of(template: str, vocabulary: Container[str]) -> Format | None:
    """Returns the format that a chat template shows, or else the one that a vocabulary is for; None for neither."""
    return next((each for each in FORMATS.values() if each.is_of(template, vocabulary)), None)
