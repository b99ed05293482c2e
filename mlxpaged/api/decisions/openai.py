"""OpenAI's dialect: POST /v1/decisions with `input` and a list of questions, as `client.decisions.create` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.decisions.decide import Decided
from mlxpaged.api.decisions.figures import best, confidence, score
from mlxpaged.api.decisions.frame import Evidence
from mlxpaged.api.decisions.question import MAX_OPTIONS, Option, Question, as_text, literal, predicate
from mlxpaged.api.decisions.schema import text_of
from mlxpaged.api.errors import bad_parameter
from mlxpaged.api.generation.images import MAX_IMAGES
from mlxpaged.api.media import InputImagePart, MediaPart, Shown, joined, media_of
from mlxpaged.api.openai.responses.schema import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    MessageItem,
)
from mlxpaged.api.openai.responses.translation import check_calls, messages_of
from mlxpaged.api.schema import MAX_LIST, Body, OneOf

CLIENT_NAMES = {"messages": "input", "prompt": "input"}
JSON_PART = "input_json"

Item = Annotated[
    MessageItem | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput,
    OneOf("type", default=lambda fields: "message"),
]


class TextPart(Body):
    type: Literal["input_text"]
    text: str


class JsonPart(Body):
    """data: shown as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


Part = Annotated[TextPart | InputImagePart | JsonPart, OneOf("type")]


class QuestionFields(Body):
    """instructions: the question, or a statement. name: stands in the answer."""

    name: str | None = None
    instructions: str | Annotated[list[Part], Field(min_length=1, max_length=MAX_LIST)]


class PredicateQuestion(QuestionFields):
    """How likely is it that a statement is true?"""

    type: Literal["predicate"]


class Choice(Body):
    value: str | bool
    description: str | None = None


class ChoiceQuestion(QuestionFields):
    """Which option is right? A string and a boolean of the same text are two options."""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_OPTIONS)]


class Level(Body):
    label: str
    description: str | None = None


class ScoreQuestion(QuestionFields):
    """Which level, from the lowest on?"""

    type: Literal["score"]
    levels: Annotated[list[Level], Field(min_length=2, max_length=MAX_OPTIONS)]


AnyQuestion = Annotated[PredicateQuestion | ChoiceQuestion | ScoreQuestion, OneOf("type")]


def with_json_as_text(items: Any) -> Any:
    """Returns the items of an input with the JSON parts of the user's messages as parts of text. Raises ApiError."""
    if not isinstance(items, list):
        return items
    return [
        {**item, "content": list(text_parts(item["content"], f"input.{i}.content"))}
        if isinstance(item, dict) and item.get("role") == "user" and isinstance(item.get("content"), list)
        else item
        for i, item in enumerate(items)
    ]


def text_parts(parts: list[Any], param: str) -> Iterator[Any]:
    for j, part in enumerate(parts):
        if isinstance(part, dict) and part.get("type") == JSON_PART:
            data, place = part.get("data"), f"{param}.{j}.data"
            if not isinstance(data, dict | list) or (
                isinstance(data, list) and not all(isinstance(each, dict) for each in data)
            ):
                raise bad_parameter(place, "must be an object, or an array of objects")
            yield {"type": "input_text", "text": as_text(data, place)}
        else:
            yield part


def evidence_of(given: str | list[Any]) -> Evidence:
    """Returns the input. Raises ApiError."""
    if isinstance(given, str):
        return Evidence([{"role": "user", "content": given}], joined=True)
    check_calls([], given)
    return Evidence(messages_of(None, given), media_of(given, "input"))


def questions_of(given: Sequence[PredicateQuestion | ChoiceQuestion | ScoreQuestion]) -> list[Question]:
    """Raises ApiError."""
    return [question_of(each, f"questions.{i}") for i, each in enumerate(given)]


def question_of(given: PredicateQuestion | ChoiceQuestion | ScoreQuestion, param: str) -> Question:
    place = f"{param}.instructions"
    text, media = given.instructions, list[Shown]()
    if not isinstance(text, str):
        texts = [part_text(part, f"{place}.{j}") for j, part in enumerate(text)]
        media = [
            Shown(part, f"{place}.{j}", f"questions.instructions.{part.type}", True)
            for j, part in enumerate(text)
            if isinstance(part, MediaPart)
        ]
        if len(media) > MAX_IMAGES:
            raise bad_parameter(place, f"has {len(media)} images; the limit is {MAX_IMAGES}", code="too_many_images")
        text = joined(texts)
    text = text_of(text, place)
    match given:
        case PredicateQuestion():
            return predicate(text, param, media=media)
        case ChoiceQuestion():
            values = [choice.value for choice in given.choices]
            for index, value in enumerate(values):
                if any(value == other and type(value) is type(other) for other in values[:index]):
                    raise bad_parameter(
                        f"{param}.choices.{index}.value", f"{value!r} is there twice; choices must differ"
                    )
            options = tuple(Option(literal(each.value, values), each.description or "") for each in given.choices)
            return Question(text, options, param, f"{param}.choices", media)
        case ScoreQuestion():
            options = tuple(Option(each.label, each.description or "") for each in given.levels)
            return Question(text, options, param, f"{param}.levels", media)


def part_text(part: TextPart | InputImagePart | JsonPart, param: str) -> str:
    return as_text(part.data, f"{param}.data") if isinstance(part, JsonPart) else part.text


def rendered(given: Sequence[PredicateQuestion | ChoiceQuestion | ScoreQuestion], decided: Decided) -> dict[str, Any]:
    """Returns the body of the answer."""
    pairs = zip(given, decided.probabilities, strict=True)
    return {
        "object": "decision",
        "id": decided.request_id,
        "model": decided.model,
        "answers": [answer(question, probabilities) for question, probabilities in pairs],
        "usage": {
            "input_tokens": decided.num_input,
            "input_tokens_details": {
                "cached_tokens": decided.num_cached,
                "cache_write_tokens": decided.num_input - decided.num_cached,
            },
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": decided.num_input,
        },
    }


def answer(
    question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, found: Sequence[float] | None
) -> dict[str, Any]:
    """found: None if the model gives no option a probability, which is a refusal."""
    if found is None:
        return {"type": "refusal", "name": question.name}
    named: dict[str, Any] = {"type": question.type, "name": question.name}
    match question:
        case PredicateQuestion():
            return named | {"probability": found[1]}
        case ChoiceQuestion():
            values = [choice.value for choice in question.choices]
            each = [{"value": value, "probability": p} for value, p in zip(values, found, strict=True)]
            return named | {"choice": values[best(found)], "confidence": confidence(found), "probabilities": each}
        case ScoreQuestion():
            each = [
                {"value": index, "label": level.label, "probability": p}
                for index, (level, p) in enumerate(zip(question.levels, found, strict=True))
            ]
            return named | {"score": score(found), "confidence": confidence(found), "probabilities": each}
