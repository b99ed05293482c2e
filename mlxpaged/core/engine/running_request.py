"""A request inside the engine: its sequence, and the text that its tokens make."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.logprobs import PromptLogprobs, PromptRows, TokenLogprobs
from mlxpaged.core.engine.matcher import Mask, Matcher, is_allowed
from mlxpaged.core.engine.request import Request, RequestOutput
from mlxpaged.core.engine.sampler import SampledToken, SamplingRow
from mlxpaged.core.engine.timeline import TimelineRecorder
from mlxpaged.core.scheduling.sequence import FinishReason, Sequence
from mlxpaged.core.text.answer_stop import AnswerStop
from mlxpaged.core.text.thinking_budget import ThinkingBudget
from mlxpaged.models.text.tokenizer import Tokenizer


class RunningRequest:
    """A request inside the engine: its sequence and the state of its text.

    `advance` decides whether an answer ends: by a stop token, max_tokens, its grammar, or a stop string. What else ends
    one as complete calls `complete`.
    parent: of a fork. prompt_logprobs: if it asked for them. Steps fill them, and the first output takes them. Those of
    a fork are its parent's, whose prompt is complete before the fork runs.
    """

    def __init__(
        self,
        request: Request,
        sequence: Sequence,
        tokenizer: Tokenizer,
        matcher: Matcher | None,
        parent: RunningRequest | None = None,
    ) -> None:
        self.request = request
        self.sequence = sequence
        self.matcher = matcher
        self.num_top = request.params.prompt_logprobs or 0  # for each token of the prompt
        self.prompt_logprobs: PromptLogprobs | None = None if parent is None else parent.prompt_logprobs
        if request.params.prompt_logprobs is not None and self.prompt_logprobs is None:
            first = max(1, request.params.prompt_logprobs_from)
            self.prompt_logprobs = PromptLogprobs.unknown(request.prompt_token_ids, self.num_top, first)
            sequence.logits_from = first - 1 if first < sequence.num_prompt_tokens else None
        after = request.prompt_token_ids[-1] if request.params.continues_text else None
        self.detokenizer = tokenizer.detokenizer(request.params.think_tags, request.params.tool_tags, after)
        form = request.params.answer_form if request.params.stop else None
        self.stop = AnswerStop(request.params.stop, None if form is None else form.parser(tokenizer.tags))
        self.num_tokens = 0  # of the answer, as text
        self.stop_cause: str | None = None  # as in RequestOutput
        self.num_drafted = self.num_accepted = 0  # draft tokens that were verified, and those that were sampled
        self.made_chars = 0  # characters of the answer so far, including those that are held back
        self.sent_chars = 0
        self.held_logprobs: list[tuple[TokenLogprobs, int, int]] = []  # with the start and the end of the token's text
        self.seed = secrets.randbits(64) if request.params.seed is None else request.params.seed
        self.timeline = TimelineRecorder(sequence) if request.timeline else None
        limit, start, end = request.params.thinking_budget, tokenizer.think_start_ids, tokenizer.think_end_ids
        inside = request.params.begins_thinking
        closes = request.params.close_thought
        self.thinking: ThinkingBudget | None = None
        if limit is not None or closes:
            most, following, calls = math.inf if limit is None else limit, tokenizer.think_next_ids, tokenizer.call_ids
            self.thinking = ThinkingBudget(most, start, end, inside, following, calls)
        self._ends = tokenizer.eos_token_ids & sequence.stop_token_ids if closes else frozenset()
        # Whether the sampler needs all earlier tokens: then it waits until the last one is read from the device.
        self.needs_tokens = matcher is not None or self.thinking is not None or request.params.penalizes

    def forbidden(self, position: int) -> frozenset[int]:
        """The tokens that must not be sampled at `position`."""
        too_short = position - self.sequence.num_prompt_tokens < self.request.params.min_tokens
        return self.sequence.stop_token_ids if too_short else frozenset()

    def forced(self, drafts: ListOf[int], mask: Mask | None) -> int | None:
        """The token that must come after these drafts, if any. It waits while the grammar wants an incomplete character
        finished. mask: the tokens that the grammar allows there."""
        token = None if self.thinking is None else self.thinking.after(drafts).forced()
        return token if token is None or mask is None or is_allowed(mask, token) else None

    def _close(self, drafts: ListOf[int]) -> tuple[int, frozenset[int]] | None:
        token = None if self.thinking is None else self.thinking.after(drafts).close
        return None if token is None else (token, self._ends)

    def sampling_row(self, position: int, mask: Mask | None, drafts: ListOf[int]) -> SamplingRow:
        """The sampler's input for the token at `position`. mask: the tokens that the grammar allows there. drafts: the
        tokens before it that may be rejected."""
        sequence = self.sequence
        return SamplingRow(
            sequence.sequence_id,
            self.request.params,
            self.seed,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            position,
            forbidden=self.forbidden(position) if mask is None else (),
            mask=mask,
            forced=self.forced(drafts, mask),
            drafts=drafts,
            close=self._close(drafts) if self._ends and mask is None else None,
        )

    def advance(self, sampled: SampledToken, now: float) -> RequestOutput:
        """Turn the next token of the sequence into text. The output has a finish reason if the answer ends with it."""
        sequence = self.sequence
        self.num_tokens += 1
        reason = sequence.finish_reason_after(sampled.token_id, self.num_tokens)
        complete = self.matcher is not None and self.matcher.advance(sampled.token_id)
        if self.thinking is not None:
            self.thinking.add(sampled.token_id)
        if self.timeline is not None:
            self.timeline.sample_token(now)
        piece = "" if reason is FinishReason.STOP else self.detokenizer.add(sampled.token_id)
        if complete:
            reason = FinishReason.STOP
        if reason is not None:
            piece += self.detokenizer.finish()
        if sampled.logprobs is not None:
            self.held_logprobs.append((sampled.logprobs, self.made_chars, self.made_chars + len(piece)))
        self.made_chars += len(piece)
        text, stopped = self._to_send(piece, reason is not None, is_cut=reason is FinishReason.LENGTH)
        if stopped:
            reason = FinishReason.STOP
        logprobs = self._release_logprobs(reason, stopped) if self.held_logprobs else ()
        return self.output(now, reason, text=text, token_ids=(sampled.token_id,), logprobs=logprobs)

    def complete(self, now: float, cause: str) -> RequestOutput:
        """End the answer here, although the model would have gone on. The output has the text that was held back, for
        the rest of a character or of a stop string. It is cut, as by a limit, if its grammar wants more. cause: as in
        RequestOutput."""
        piece = self.detokenizer.finish()
        self.made_chars += len(piece)
        text, stopped = self._to_send(piece, ends=True, is_cut=True)
        self.stop_cause = None if stopped else cause
        is_whole = stopped or self.matcher is None or self.matcher.may_end()
        reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        logprobs = self._release_logprobs(reason, stopped)
        return self.output(now, reason, text=text, logprobs=logprobs)

    def _to_send(self, piece: str, ends: bool, is_cut: bool) -> tuple[str, bool]:
        """Returns the text to send after a piece of text, and whether a stop string was found in it. ends: whether the
        answer ends with the piece. is_cut: whether the model would have gone on."""
        counts = self.num_tokens >= self.request.params.min_tokens
        text, stopped = self.stop.feed(piece, counts)
        if ends and not stopped:
            rest, stopped = self.stop.finish(is_cut)
            text += rest
        self.sent_chars += len(text)
        return text, stopped

    def resume(self, token_ids: ListOf[int], now: float) -> None:
        """Go on after these tokens of the answer, whose text was sent before."""
        for token_id in token_ids:
            self.sequence.token_ids.append(token_id)
            self.advance(SampledToken(token_id), now)

    def add_prompt_logprobs(self, positions: range, rows: PromptRows) -> None:
        """A step has computed the log-probabilities at these positions of the prompt."""
        assert self.prompt_logprobs is not None
        self.prompt_logprobs.put(positions, rows)
        self.sequence.has_logits(positions.stop)

    def _release_logprobs(self, reason: FinishReason | None, stopped: bool) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of the text that was sent. They must not reveal the tokens of a stop string."""
        held, sent = self.held_logprobs, self.sent_chars
        if reason is None:
            self.held_logprobs = [(token, start, end) for token, start, end in held if end > sent]
            return tuple(token for token, _, end in held if end <= sent)
        return tuple(token for token, start, end in held if not stopped or start < sent or end <= sent)

    def output(
        self,
        now: float,
        reason: FinishReason | None,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        error: str | None = None,
    ) -> RequestOutput:
        """The next output for the client. It is the last one if it has a finish reason."""
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        left = self.sequence.num_output_tokens - self.num_tokens  # of the last step, the last of which was no draft
        return RequestOutput(
            request_id=self.request.request_id,
            time=now,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            num_cached_tokens=self.sequence.num_cached_tokens,
            num_output_tokens=self.num_tokens,
            finish_reason=reason,
            error=error,
            timeline=None if self.timeline is None or reason is None else self.timeline.finish(now, self.stop_cause),
            stop_string=self.stop.found,
            stop_cause=self.stop_cause,
            prompt_logprobs=prompt_logprobs,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted - max(0, left - 1),
        )
