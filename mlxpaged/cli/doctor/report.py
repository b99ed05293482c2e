"""The sections of the doctor's report: as JSON has them, and as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mlxpaged.attention.self_check import KernelCheck
from mlxpaged.attention.tuner import ShapeTimes, summary
from mlxpaged.attention.tuning import default_choice
from mlxpaged.models.loader import ServedModel

UNKNOWN = "not_measured"


def not_measured(reason: str) -> dict[str, str]:
    return {UNKNOWN: reason}


def model_section(served: ServedModel) -> dict[str, Any]:
    """A local directory is named without the directories that it is in: they may name the user."""
    return {
        "name": Path(served.name).name if Path(served.name).exists() else served.name,
        "layers": len(served.layers),
        "fused_layers": sum(spec.qkv is not None for spec in served.kv_layers),
        "weight_bytes": served.weight_bytes,
        "context": served.context_length,
    }


def checks_section(checks: Sequence[KernelCheck]) -> list[dict[str, Any]]:
    return [{"layers": str(check.shape), "case": check.case, "problem": check.problem} for check in checks]


def tuning_section(found: Sequence[ShapeTimes]) -> dict[str, Any]:
    """gain: how many times as long as the choice the default takes."""
    shapes = []
    for one in found:
        classes = []
        for entry in one.classes:
            choice, default, times = one.choice(entry), default_choice(entry), one.times.get(entry, {})
            gain = times[default] / times[choice] if choice in times and default in times else None
            us = {str(each): 1e6 * seconds for each, seconds in times.items()}
            classes.append({"class": str(entry), "choice": str(choice), "gain": gain, "us": us})
        source = "cached" if one.cached else "measured now" if one.times else "default"
        shapes.append({"layers": str(one.shape), "source": source, "classes": classes})
    return {"summary": summary(list(found)), "shapes": shapes}


def decoding_section(batches: Sequence[int], ours: Any, theirs: Any) -> list[dict[str, Any]]:
    """ours, theirs: tokens per second by batch, or why they were not measured."""
    return [
        {
            "batch": batch,
            "tokens_per_second": ours if UNKNOWN in ours else ours[batch],
            "mlx_lm_tokens_per_second": theirs if UNKNOWN in theirs else theirs[batch],
        }
        for batch in batches
    ]


def has_failed(sections: Mapping[str, Any]) -> bool:
    """Whether a kernel failed the self-check."""
    return UNKNOWN not in sections["kernels"] and any(check["problem"] for check in sections["kernels"])


# As text


def lines(name: str, content: Any) -> list[str]:
    """A section as text, with an empty line after it."""
    return [*TEXTS[name](content), ""]


def unknown(content: Any) -> str | None:
    """Why a content was not measured; None if it was."""
    return content[UNKNOWN] if isinstance(content, dict) and UNKNOWN in content else None


def machine_text(content: dict[str, str]) -> list[str]:
    width = max(map(len, content))
    return [f"{name:{width}} {value}" for name, value in content.items()]


def model_text(content: dict[str, Any]) -> list[str]:
    size = f"{content['weight_bytes'] / 1e9:.2f} GB of weights"
    layers = f"{content['layers']} layers, attention of {content['fused_layers']} fused"
    return [f"model     {content['name']}: {layers}, {size}, context {content['context']}"]


def checks_text(content: Any) -> list[str]:
    """A line per shape, followed by a line per case."""
    if (reason := unknown(content)) is not None:
        return [f"Metal kernels: not used, because {reason}; attention runs on MLX's own operations"]
    found = ["Metal kernels: compared with MLX's own operations"]
    for layers in dict.fromkeys(check["layers"] for check in content):
        found.append(layers)
        cases = [check for check in content if check["layers"] == layers]
        found += [f"  {check['case']:48} {check['problem'] or 'ok'}" for check in cases]
    return found


def tuning_text(content: Any) -> list[str]:
    """A line per shape, followed by a line per class: its choice, what it gains, and each candidate's time."""
    if (reason := unknown(content)) is not None:
        return [f"attention tuning: not measured, because {reason}"]
    found = [f"attention tuning: {content['summary']}"]
    for shape in content["shapes"]:
        found.append(f"{shape['layers']}: {shape['source']}")
        for each in shape["classes"]:
            times = ", ".join(f"{choice} {us:.0f}" for choice, us in each["us"].items())
            gain = f", {each['gain']:.2f} times as fast as the default" if (each["gain"] or 1.0) > 1 else ""
            found.append(f"  {each['class']:40} {each['choice']:11} {f'{times} us' if times else 'not measured'}{gain}")
    return found


def attention_text(content: Any) -> list[str]:
    if (reason := unknown(content)) is not None:
        return [f"attention beside MLX's: not measured, because {reason}"]
    head = f"microseconds of a layer's calls, {content['backend']} attention, beside MLX's over contiguous keys"
    if (reason := unknown(content["calls"])) is not None:
        return [f"{head}: not measured, because {reason}"]
    found = [head]
    for layers in dict.fromkeys(call["layers"] for call in content["calls"]):
        found.append(layers)
        for call in content["calls"]:
            if call["layers"] == layers:
                keys = f", {call['keys']} keys" if "keys" in call else ""
                beside = f"  MLX {call['mlx_us']:9.1f}" if "mlx_us" in call else ""
                found.append(f"  {call['call']} {call['queries']:3} tokens{keys:12} {call['us']:9.1f}{beside}")
    return found


def decoding_text(content: list[dict[str, Any]]) -> list[str]:
    found = ["decoding, tokens per second"]
    for each in content:
        ours, theirs = each["tokens_per_second"], each["mlx_lm_tokens_per_second"]
        ratio = "" if unknown(ours) or unknown(theirs) else f"  ({ours / theirs:.2f} times)"
        found.append(f"  batch {each['batch']:3}  mlxpaged {rate_text(ours)}  mlx-lm {rate_text(theirs)}{ratio}")
    return found


def rate_text(content: Any) -> str:
    reason = unknown(content)
    return f"{content:9.1f}" if reason is None else f"not measured, because {reason}"


def times_text(content: Any) -> list[str]:
    if (reason := unknown(content)) is not None:
        return [f"milliseconds of a decoding step by its rows: not measured, because {reason}"]
    found = ", ".join(f"{rows}: {milliseconds:.1f}" for rows, milliseconds in content.items())
    return [f"milliseconds of a decoding step by its rows: {found}"]


def drafts_text(content: Any) -> list[str]:
    if (reason := unknown(content)) is not None:
        return [f"draft tokens that a step would verify: unknown, because {reason}"]
    found = [
        f"{', '.join(f'{count} at batch {batch}' for batch, count in counts.items())} if {chance} are accepted"
        for chance, counts in content.items()
    ]
    return [f"draft tokens that a step would verify: {'; '.join(found)}"]


def steps_text(content: Any) -> list[str]:
    if (reason := unknown(content)) is not None:
        return [f"rows of steps with a prompt: not measured, because {reason}"]
    found = ", ".join(f"{rows} ({steps} steps)" for rows, steps in content["steps_by_rows"].items())
    return [f"rows of steps with a prompt of {content['prompt_tokens']} tokens beside one stream: {found}"]


def prefill_text(name: str, content: Any) -> list[str]:
    if (reason := unknown(content)) is not None:
        return [f"{name} prefill: not measured, because {reason}"]
    size = f"{content['bytes'] / 1e6:.1f} MB beside weights and KV cache"
    return [f"{name} prefill: {content['tokens']} tokens take {size}"]


def note_text(content: str) -> list[str]:
    return [content]


TEXTS: dict[str, Callable[[Any], list[str]]] = {
    "machine": machine_text,
    "model": model_text,
    "kernels": checks_text,
    "tuning": tuning_text,
    "attention": attention_text,
    "step_times": times_text,
    "drafts": drafts_text,
    "decoding": decoding_text,
    "prompt_steps": steps_text,
    "largest_prefill": partial(prefill_text, "largest"),
    "long_prefill": partial(prefill_text, "long"),
    "note": note_text,
}
"""How the content of each section is shown."""
