"""Forward passes of what drafts: a model's own draft head, its assistant, or a smaller model."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from functools import partial

import mlx.core as mx

from mlxpaged.attention.metadata import AttentionMetadata, HostStep
from mlxpaged.core.engine.model_runner import LastPass, ModelRunner
from mlxpaged.core.step import FIRST_CONTENT_ID, Step
from mlxpaged.models.loader import ServedModel


class DraftPasses:
    """Runs on rank 0 only, and on the engine thread, after forward passes of the runner. The output head of the model
    keeps its inputs for a draft head or an assistant."""

    def __init__(self, served: ServedModel, runner: ModelRunner, block_size: int) -> None:
        self._mtp, self._draft_model, self._rows = served.mtp, served.draft_model, served.rows
        self._runner = runner
        self._caches = runner.caches
        self._block_size = block_size
        self._further: tuple[Step, list[AttentionMetadata]] | None = None  # the latest of `further`

    def _take_last(self) -> LastPass:
        last, self._runner.last_pass = self._runner.last_pass, None
        assert last is not None
        return last

    def by_head(self, following: ListOf[int], sampled: mx.array | None, at: ListOf[int]) -> mx.array:
        """The draft head's hidden states [T, 1, D] for the T tokens of the last `forward`, not yet evaluated. Writes
        its keys and values into the blocks of these. following: the token after each. sampled[R]: those at the indices
        `at`, which are on the device."""
        last = self._take_last()
        assert self._mtp is not None
        tokens = mx.array([each if 0 <= each < FIRST_CONTENT_ID else 0 for each in following], mx.int32)
        if sampled is not None:
            tokens[mx.array(list(at))] = sampled
        metas, _ = last.step.on_device(last.vector)
        return self._caches.forward_draft(partial(self._mtp, tokens, last.hidden), metas)

    def by_assistant(self, step: Step, following: mx.array, at: ListOf[int]) -> mx.array:
        """An assistant's hidden states [R, 1, D] for these of the tokens of the last `forward`, not yet evaluated.
        step: of one row for each of them. following[R]: the token after each."""
        last = self._take_last()
        assert self._mtp is not None
        is_all = len(at) == last.hidden.shape[0]
        metas = last.step.on_device(last.vector)[0] if is_all else self._metas(step)
        hidden = last.hidden if is_all else last.hidden[mx.array(list(at))]
        return self._caches.forward_draft(partial(self._mtp, following, hidden), metas)

    def further(self, step: Step, following: mx.array, hidden: mx.array) -> mx.array:
        """Does what `by_head` does for a step of one token for each sequence, after `by_head` or `by_assistant`.
        following[T]: the tokens after these. hidden[T, 1, D]: the head's own states of the tokens before these."""
        assert self._mtp is not None
        if self._further is None or self._further[0] is not step:
            self._further = step, self._metas(step)
        return self._caches.forward_draft(partial(self._mtp.further, following, hidden), self._further[1])

    def by_model(self, step: Step, tokens: mx.array, wanted: ListOf[int]) -> mx.array:
        """Logits [W, V] of the draft model after the tokens [T] of a step at these indices, not yet evaluated. Writes
        its keys and values into their blocks."""
        assert self._draft_model is not None
        return self._caches.forward_draft(partial(self._draft_model, tokens, wanted), self._metas(step))

    def project(self, hidden: mx.array) -> mx.array:
        """Logits [T, V] of hidden states [T, 1, D] of the draft head."""
        assert self._rows is not None
        assert self._mtp is not None
        return (self._mtp.project or self._rows.project)(hidden)[:, -1]

    def _metas(self, step: Step) -> list[AttentionMetadata]:
        host = HostStep.build(step, self._block_size, (), self._caches.views, self._caches.planners)
        metas, _ = host.on_device(host.upload())
        return metas
