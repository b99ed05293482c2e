"""Images, audio and files in a conversation, which no model here takes. Those of earlier turns and of tool results
become a text, so that they do not end a session; one in the newest turn is an error."""

from __future__ import annotations

from typing import Any

from pydantic_core import PydanticCustomError

MEDIA = {
    ("an image", "images are"): ("image", "image_url", "input_image"),
    ("an audio", "audio is"): ("audio", "audio_url", "input_audio"),
    ("a video", "videos are"): ("video", "video_url", "input_video"),
    ("a file", "files are"): ("file", "input_file"),
    ("a document", "documents are"): ("document",),
}
BY_TYPE = {kind: names for names, kinds in MEDIA.items() for kind in kinds}
"""Maps the type of a part to what one is called in a text, and several in an error."""
ANSWERS = ("function_call", "custom_tool_call", "reasoning")
"""Types of the responses API's items, beside messages of the assistant, that an answer consists of."""
RESULTS = ("function_call_output", "custom_tool_call_output")


def names_of(part: Any) -> tuple[str, str] | None:
    """Returns the names of a part that is not text, see BY_TYPE."""
    kind = part.get("type") if isinstance(part, dict) else None
    return BY_TYPE.get(kind) if isinstance(kind, str) else None


def refuse(part: Any) -> Any:
    """Raises a pydantic error for a part that is not text. The schema's own error would not say why."""
    names = names_of(part)
    if names is not None:
        raise PydanticCustomError("unsupported_media", "{names} not supported by this server", {"names": names[1]})
    return part


def leave_out(conversation: Any) -> list[str]:
    """Replaces what is no text in the earlier turns and the tool results of a conversation, in place, by a text that
    says so. Returns the places of what was replaced, without indices.

    conversation: the messages or items of any API, before they are checked. The newest turn begins after the last
    answer; an answer at the end, which is to be continued, does not count.
    """
    if not isinstance(conversation, list):
        return []
    answers = [i for i, item in enumerate(conversation[:-1]) if is_answer(item)]
    newest = answers[-1] + 1 if answers else 0
    found: dict[str, None] = {}
    for i, item in enumerate(conversation):
        if isinstance(item, dict):
            earlier = i < newest or item.get("role") == "tool" or item.get("type") in RESULTS
            found |= dict.fromkeys(left_out(item, earlier))
    return list(found)


def is_answer(item: Any) -> bool:
    return isinstance(item, dict) and (item.get("role") == "assistant" or item.get("type") in ANSWERS)


def left_out(item: dict[str, Any], earlier: bool) -> list[str]:
    """Replaces the media of one message, or only those of the tool results in it. Returns their places in it."""
    found = []
    images = item.get("images")  # Ollama's
    if earlier and isinstance(images, list) and images and isinstance(item.get("content", ""), str | None):
        item["content"] = "\n".join(filter(None, (item.get("content"), *(text_for("an image") for _ in images))))
        item["images"] = []
        found.append("images")
    for name in ("content", "output"):
        parts = item.get(name)
        if not isinstance(parts, list):
            continue
        for i, part in enumerate(parts):
            names = names_of(part)
            if names is not None and earlier:
                found.append(f"{name}.{part['type']}")
                parts[i] = {"type": "input_text" if part["type"].startswith("input_") else "text"}
                parts[i]["text"] = text_for(names[0])
            elif isinstance(part, dict) and part.get("type") == "tool_result":
                found += (f"{name}.{place}" for place in left_out(part, True))
    return found


def text_for(name: str) -> str:
    return f"[{name} was left out: this model takes text only]"
