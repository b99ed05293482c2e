"""Defines what the bodies of all dialects have in common: how options are read, deadlines, and images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.decisions.decide import Answers, Calibration, Method
from mlxpaged.api.decisions.question import as_text
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.readout import ONE_TOKEN
from mlxpaged.api.generation.request import GenerationRequest
from mlxpaged.api.media import ImageBlock, ImageSource, InputImagePart, MediaPart, Shown, joined
from mlxpaged.api.schema import MAX_LIST, Body

Images = Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_LIST)]
Content = str | dict[str, Any] | list[Any]
"""Text, or JSON that is shown as text."""


class MethodFields(Body):
    """Additions to all dialects. calibration, orders, answers: as in `Method`, null for the default. timeout:
    seconds for the whole answer. ttft_timeout: seconds that each row may wait."""

    calibration: Calibration | None = None
    orders: Literal[1, 2] | None = None
    answers: Answers | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    ttft_timeout: Annotated[float, Field(gt=0)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None

    def method(self, default: Method, **more: Any) -> Method:
        return default.with_given(calibration=self.calibration, orders=self.orders, answers=self.answers, **more)

    def request(self, model: str | None, names: Mapping[str, str], cache_salt: str = "") -> GenerationRequest:
        """names: the client's names of fields that have other names there."""
        return GenerationRequest(
            [],
            ONE_TOKEN,
            model,
            cache_salt=cache_salt,
            service_tier=self.service_tier,
            timeout=self.timeout,
            ttft_timeout=self.ttft_timeout,
            client_names=names,
        )


def text_of(value: Any, param: str) -> str:
    """Returns the text of a question's instructions. Raises ApiError if there is none."""
    text = as_text(value, param).strip()
    if not text:
        raise bad_parameter(param, "must not be empty")
    return text


def shown_images(images: list[str] | None, param: str = "images") -> list[Shown]:
    """Returns images that are given as data URLs, as URLs, or as base64."""
    parts: list[MediaPart] = []
    for image in images or ():
        if image.lower().startswith(("data:", "http:", "https:")):
            parts.append(InputImagePart(type="input_image", image_url=image))
        else:
            parts.append(ImageBlock(type="image", source=ImageSource(type="base64", data=image)))
    return [Shown(part, f"{param}.{i}", f"{param}.{part.type}", True) for i, part in enumerate(parts)]


def with_images(text: str, images: list[Shown]) -> str:
    """Returns the text of an input after its images."""
    return joined([*(each.sentinel for each in images), *([text] if text else [])])
