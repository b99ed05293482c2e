"""The tags of thoughts."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True)
class ThoughtTags:
    """start, end: around a thought. anywhere: whether a thought may also begin after text. If its tags are common text,
    only the first counts. next: control tokens that begin the next part of an answer. A thought that is not closed ends
    before them."""

    start: str = ""
    end: str = ""
    anywhere: bool = False
    next: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.start)


THOUGHTS = (
    ThoughtTags("<think>", "</think>"),
    ThoughtTags("<longcat_think>", "</longcat_think>"),
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<mm:think>", "</mm:think>"),
    ThoughtTags("<think:opensource>", "</think:opensource>"),
    ThoughtTags("<|think:start|>", "<|think:end|>"),
    ThoughtTags("[THINK]", "[/THINK]", anywhere=True),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True, next=("<|START_RESPONSE|>",)),
    ThoughtTags("<|inner_prefix|>", "<|inner_suffix|>", anywhere=True),
    ThoughtTags("<|channel>thought", "<channel|>", anywhere=True),
    ThoughtTags(
        *("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        anywhere=True,
        next=("<|open|>response<|sep|>", "<|open|>tools<|sep|>"),
    ),
)


def thought_tags(vocabulary: Container[str]) -> ThoughtTags:
    """Returns the tags that are tokens of a model, or that begin with such tokens; empty ones if there are none."""
    for tags in THOUGHTS:
        if all(tag in vocabulary for tag in first_tokens(tags)):
            return tags
    return ThoughtTags()


def first_tokens(tags: ThoughtTags) -> tuple[str, ...]:
    if tags.start.startswith("<|channel>"):
        return "<|channel>", "<channel|>"
    if tags.start.startswith("<|open|>"):
        return "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
    return tags.start, tags.end
