"""Defines images, audio and files in the conversations of all APIs.

A part that is no text stands in its message as a sentinel: a text that no client can know, so that all that handles
messages handles strings. `generation/images.py` decides what becomes of it when the model is known.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, PrivateAttr, ValidationInfo, model_validator

from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.fields.kinds import PARTS
from mlxpaged.api.foreign import SHOWN, conversation_of, hint, leave_out, text_of_document, text_shown, type_name
from mlxpaged.api.schema import Body
from mlxpaged.vision.reading import ClientImage, Detail

IMAGES = ("image", "image_url", "input_image")
OTHERS = {
    "audio": ("an audio", "audio is"),
    "audio_url": ("an audio", "audio is"),
    "input_audio": ("an audio", "audio is"),
    "video": ("a video", "videos are"),
    "video_url": ("a video", "videos are"),
    "input_video": ("a video", "videos are"),
    "file": ("a file", "files are"),
    "input_file": ("a file", "files are"),
    "document": ("a document", "documents are"),
}
NAMES = OTHERS | dict.fromkeys(IMAGES, ("an image", "images are"))
"""Maps the type of a part to what one is called in a text, and several in an error."""
ANSWERS = ("function_call", "custom_tool_call", "reasoning")
"""Types of the responses API's items, beside messages of the assistant, that an answer consists of."""
RESULTS = ("function_call_output", "custom_tool_call_output")
START, END = "\ue000", "\ue001"
"""The ends of a sentinel. They belong to no script, so nothing trims them or changes their case."""


class MediaPart(Body):
    """A part of a message that is no text."""

    type: str
    _sentinel: str = PrivateAttr(default_factory=lambda: f"{START}{secrets.token_hex(16)}{END}")

    @property
    def text(self) -> str:
        """Returns its sentinel."""
        return self._sentinel

    @property
    def image(self) -> ClientImage | None:
        return None


class ImageUrl(Body):
    url: str
    detail: Annotated[Detail | None, hint("*.content.image_url.detail")] = None


def as_object(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


class ImageUrlPart(MediaPart):
    """An image of chat completions."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(as_object, json_schema_input_type=str | ImageUrl)]

    @property
    def image(self) -> ClientImage:
        return ClientImage(self.image_url.url, True, self.image_url.detail or "auto")


class InputImagePart(MediaPart):
    """An image of the responses API. file_id: there are no stored images."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Annotated[Detail | None, hint("*.content.detail")] = None

    @property
    def image(self) -> ClientImage:
        return ClientImage(self.image_url or "", True, self.detail or "auto")


class ImageSource(Body):
    """media_type: it is not read, because the file itself says what it is. file_id: there are no stored images."""

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(MediaPart):
    """An image of Anthropic's API."""

    type: Literal["image"]
    source: ImageSource

    @property
    def image(self) -> ClientImage:
        if self.source.data is None:
            return ClientImage(self.source.url or "", True)
        return ClientImage(self.source.data, False)


class OtherPart(MediaPart):
    """Any other part. Only its type is kept, and the text that is shown of it.

    shown_text: the whole text of a document or a search result, or what can be read of a part that another provider's
    service has made, which is noted. None: nothing is shown of it."""

    type: str
    shown_text: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, value: Any, info: ValidationInfo) -> Any:
        """No other field is read, so none is ignored."""
        if not isinstance(value, dict):
            return value
        kind = value["type"]
        text = text_of_document(value)
        if text is None and kind not in NAMES and (text := text_shown(kind, value, PARTS)) is not None:
            leave_out(info, f"{conversation_of(info)}.content.{type_name(kind)}", SHOWN)
        return {"type": kind, "shown_text": text}

    @property
    def text(self) -> str:
        return self._sentinel if self.shown_text is None else self.shown_text

    @property
    def is_media(self) -> bool:
        """Whether it is an image, audio, a video or a file, and not what a service has put there."""
        return self.type in NAMES

    @property
    def may_be_left_out(self) -> bool:
        """Whether no answer is about it, wherever it stands."""
        return self.type in PARTS and not self.is_media


Medium = ImageUrlPart | InputImagePart | ImageBlock | OtherPart
"""Every API takes the forms of all."""


def names_of(kind: str) -> tuple[str, str]:
    """Returns what a part of this type is called in a text, and several in an error."""
    return NAMES.get(kind) or (f"a part of the type {type_name(kind)!r}", f"parts of the type {type_name(kind)!r} are")


def all_but(kind: str) -> tuple[str, ...]:
    """Returns the types of all parts that are no text, without an API's own of images."""
    return tuple(other for other in NAMES if other != kind)


@dataclass(frozen=True)
class Shown:
    """A part of a conversation that is no text. param: its place in the client's body. field: the same without indices.
    is_newest: whether it is in the newest turn, and no result of a tool."""

    part: MediaPart
    param: str
    field: str
    is_newest: bool

    def instead(self, because: str) -> str:
        """Returns the text that stands in its place if it is left out. A part that no user has shown has none."""
        return f"[{names_of(self.part.type)[0]} was left out: {because}]" if self.part.type in NAMES else ""

    @property
    def sentinel(self) -> str:
        return self.part.text


def media_of(conversation: Sequence[BaseModel], name: str, num_earlier: int = 0) -> list[Shown]:
    """Returns the parts of a conversation that are no text. The newest turn begins after the last answer; an answer at
    the end, which is to be continued, does not count. Raises ApiError for one in the newest turn that no model takes.

    conversation: the messages or items of any API. name: the field that has them. num_earlier: how many at the
    beginning are those of a stored response."""
    answers = [i for i, item in enumerate(conversation[:-1]) if is_answer(item)]
    newest = answers[-1] + 1 if answers else 0
    found = []
    for i, item in enumerate(conversation):
        may_be_refused = i >= newest and not is_result(item)
        for part, path, in_result in parts_of(item):
            is_newest = may_be_refused and not in_result and not getattr(part, "may_be_left_out", False)
            if is_answer(item) and part.type not in NAMES:
                is_newest = False
            at = (name, i - num_earlier, *path) if i >= num_earlier else ("previous_response_id",)
            param = ".".join(map(str, at))
            if is_newest and part.image is None:
                raise bad_parameter(param, f"{names_of(part.type)[1]} not supported by this server")
            own = () if path[0] == "images" else (type_name(part.type),)
            field = ".".join((name, *(step for step in path if isinstance(step, str)), *own))
            found.append(Shown(part, param, field, is_newest))
    return found


def is_answer(item: BaseModel) -> bool:
    of_answer = getattr(item, "is_of_answer", False)
    return of_answer or getattr(item, "role", None) == "assistant" or getattr(item, "type", None) in ANSWERS


def is_result(item: BaseModel) -> bool:
    return getattr(item, "role", None) in ("tool", "function") or getattr(item, "type", None) in RESULTS


def parts_of(item: BaseModel) -> Iterator[tuple[MediaPart, tuple[str | int, ...], bool]]:
    """Yields the parts of a message that are no text, with their paths in it, and whether they are in a result."""
    for name in ("content", "output"):
        parts = getattr(item, name, None)
        for j, part in enumerate(parts if isinstance(parts, list) else ()):
            if isinstance(part, MediaPart):
                if not (isinstance(part, OtherPart) and part.shown_text is not None):
                    yield part, (name, j), False
            elif getattr(part, "type", None) == "tool_result":
                yield from ((inner, (name, j, *path), True) for inner, path, _ in parts_of(part))
    for j, part in enumerate(getattr(item, "shown_images", ())):  # Ollama's
        yield part, ("images", j), False


def joined(texts: Sequence[str]) -> str:
    """Returns texts as one, in lines of their own. There is no line feed before and after a part that is no text."""
    pieces: list[str] = []
    for text in texts:
        if pieces and not pieces[-1].endswith(END) and not text.startswith(START):
            pieces.append("\n")
        pieces.append(text)
    return "".join(pieces)
