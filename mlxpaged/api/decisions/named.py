"""Questions by name, as System One and mlx-vlm define them: their types differ little."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from mlxpaged.api.decisions.decide import Decided
from mlxpaged.api.decisions.frame import Evidence
from mlxpaged.api.decisions.question import MAX_OPTIONS, MAX_QUESTIONS, Option, Question, as_text, predicate
from mlxpaged.api.decisions.schema import Content, shown_images, text_of, with_images
from mlxpaged.api.errors import ApiError, bad_parameter
from mlxpaged.api.schema import Body, OneOf

FALSE, TRUE = "false", "true"


class NamedChoice(Body):
    """criteria: a description of each option, or null; or a list of options. instructions: the name by default."""

    type: Literal["choice"] = "choice"
    instructions: Content | None = None
    criteria: dict[str, Any] | list[str]


class NamedScore(Body):
    """criteria: what each level means, from the lowest on."""

    type: Literal["score"]
    instructions: Content | None = None
    criteria: Annotated[list[Content], Field(min_length=2, max_length=MAX_OPTIONS)]


class NamedBool(Body):
    """criteria: what false and true mean."""

    type: Literal["noul", "bool"]
    instructions: Content | None = None
    criteria: dict[Literal["false", "true"], Content] | None = None


class NamedLabels(Body):
    """Which labels fit, each for itself? threshold: the least probability of one that does."""

    type: Literal["multi_label"]
    instructions: Content | None = None
    criteria: dict[str, Any] | list[str]
    threshold: Annotated[float, Field(ge=0, le=1)] | None = None


NamedQuestion = Annotated[
    NamedChoice | NamedScore | NamedBool | NamedLabels, OneOf("type", default=lambda fields: "choice")
]
AnyNamed = NamedChoice | NamedScore | NamedBool | NamedLabels
NamedQuestions = Annotated[dict[str, NamedQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]


@dataclass(frozen=True)
class Named:
    """given: what a client asks. questions: those that the model is asked for it: one, or one for each label."""

    name: str
    given: AnyNamed
    labels: Sequence[str]
    questions: Sequence[Question]


def named_of(given: Mapping[str, AnyNamed]) -> list[Named]:
    """Raises ApiError."""
    return [one_of(name, each) for name, each in given.items()]


def one_of(name: str, given: AnyNamed) -> Named:
    param = f"questions.{name}"
    text = text_of(given.instructions or name, f"{param}.instructions")
    place = f"{param}.criteria"
    match given:
        case NamedChoice():
            labels = labels_of(given.criteria, place, least=2)
            options = tuple(Option(label, description) for label, description in labels)
            return Named(name, given, [label for label, _ in labels], [Question(text, options, param, place)])
        case NamedScore():
            levels = [as_text(each, f"{place}.{i}") for i, each in enumerate(given.criteria)]
            options = tuple(Option(str(i), level) for i, level in enumerate(levels))
            return Named(name, given, levels, [Question(text, options, param, place)])
        case NamedBool():
            told = {str(key): as_text(each, f"{place}.{key}") for key, each in (given.criteria or {}).items()}
            question = predicate(text, param, told.get(FALSE, ""), told.get(TRUE, ""))
            return Named(name, given, [FALSE, TRUE], [question])
        case NamedLabels():
            labels = labels_of(given.criteria, place, least=1)
            asked = [f"{text}\nDoes this fit: {label}{f' ({told})' if told else ''}?" for label, told in labels]
            return Named(name, given, [label for label, _ in labels], [predicate(each, param) for each in asked])


def labels_of(criteria: Mapping[str, Any] | Sequence[str], param: str, least: int) -> list[tuple[str, str]]:
    """Returns labels with their descriptions. Raises ApiError for too few or too many, and for one that is there
    twice."""
    if not least <= len(criteria) <= MAX_OPTIONS:
        raise bad_parameter(param, f"must have {least} to {MAX_OPTIONS} options, got {len(criteria)}")
    found: list[tuple[str, str]] = []
    for i, label in enumerate(criteria):
        if any(label == known for known, _ in found):
            raise bad_parameter(f"{param}.{i}", f"{label!r} is there twice; options must differ")
        if not label.strip():
            raise bad_parameter(f"{param}.{i}", "must not be empty")
        told = criteria[label] if isinstance(criteria, Mapping) else None
        found.append((label, "" if told is None else as_text(told, f"{param}.{label}")))
    return found


def evidence_of(state: Any, images: list[str] | None) -> Evidence:
    """Raises ApiError."""
    media = shown_images(images)
    text = "" if state is None else as_text(state, "state")
    return Evidence([{"role": "user", "content": with_images(text, media)}], media, joined=True)


def rendered(
    named: Sequence[Named],
    decided: Decided,
    model: str,
    answer: Callable[[Named, Sequence[list[float]]], dict[str, Any]],
) -> dict[str, Any]:
    """Returns the body of the answer. `answer` renders one named question by the probabilities of its own questions.

    Raises ApiError if an option cannot be told from the others: neither dialect has refusals.
    """
    left = iter(decided.probabilities)
    answers = {each.name: answer(each, [known(next(left), each.name) for _ in each.questions]) for each in named}
    return {"model": model, "answers": answers, "usage": {"input_tokens": decided.num_input, "output_tokens": 0}}


def known(probabilities: list[float] | None, name: str) -> list[float]:
    """Raises ApiError if there are none."""
    if probabilities is None:
        param = f"questions.{name}"
        raise ApiError(422, f"{param}: the model gives none of the options a probability", param=param, code="refused")
    return probabilities
