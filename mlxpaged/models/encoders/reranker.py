"""Rerankers: models that generate text, and were trained to judge by "yes" or "no" whether a document fits a query.

Qwen3-Reranker is of this kind (Zhang et al. 2025, "Qwen3 Embedding", section 2). Its directory is that of an ordinary
Qwen3, so only its name tells it apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.files.kinds import QWEN_RERANKER
from mlxpaged.models.text.tokenizer import Tokenizer

JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
"""What the model was trained with: its authors' prompt, and the instruction for requests that have none."""


@dataclass(frozen=True)
class Reranker:
    """yes, no: the tokens that its answer is one of. The score is the probability of yes, given that."""

    tokenizer: Tokenizer
    yes: int
    no: int

    def prompt(self, query: str, document: str, instruct: str | None) -> list[int]:
        """Returns the tokens of a prompt that the model answers with yes or no. The document comes last, so that the
        prompts of one query share what is before it. Raises ChatTemplateError."""
        text = f"<Instruct>: {instruct or INSTRUCT}\n<Query>: {query}\n<Document>: {document}"
        options: dict[str, Any] = {"enable_thinking": False} if self.tokenizer.template_reads("enable_thinking") else {}
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": text}]
        return self.tokenizer.apply_chat_template(messages, **options)


def make_reranker(name: str, tokenizer: Tokenizer, asked: bool) -> Reranker:
    """name: the model's directory or repository. asked: whether the user says that it is a reranker. Raises
    UnsupportedModelError, with the reason, if it is none."""
    if not asked and QWEN_RERANKER not in name.lower():
        raise UnsupportedModelError(
            f"its name does not contain {QWEN_RERANKER!r}; if it is one, start the server with --reranker"
        )
    if not tokenizer.has_chat_template:
        raise UnsupportedModelError("it has no chat template, by which a reranker's prompt is written")
    words = [tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")]
    if any(len(tokens) != 1 for tokens in words):
        raise UnsupportedModelError('"yes" and "no" are not one token each in its vocabulary')
    [[yes], [no]] = words
    return Reranker(tokenizer, yes, no)
