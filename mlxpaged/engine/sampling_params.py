"""How the tokens of one request are chosen, and when its answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxpaged.engine.constraint import Constraint, StructuredOutput

MIN_TEMPERATURE = 1e-5
"""Below it, dividing float32 logits by the temperature overflows long before a second token could be drawn."""


@dataclass(frozen=True)
class SamplingParams:
    """Ranges are checked where requests come in (api/). max_tokens: None for as many as context and pool allow.

    temperature: 0 is greedy. top_k: 0 for all. repetition_penalty: divides (positive) or multiplies (negative) logits
    of tokens seen in prompt or answer (CTRL, Keskar et al. 2019). presence_ and frequency_penalty: subtracted once, and
    per occurrence, for tokens of the answer, as OpenAI defines them. seed: None draws one. logprobs: None for none,
    else the number of most likely tokens to report beside the sampled one. min_tokens: so many are drawn before a token
    or a string may end the answer. constraint: what the answer must be; it ends where nothing can follow, whatever
    ignore_eos and min_tokens say, which only keep it from ending where it could go on. think_tags, tool_tags: whether
    the text shows the special tokens that mark thinking and tool calls. thinking_budget: most tokens in think blocks,
    for models that have them; None for any number, and always with logprobs. begins_thinking: whether the prompt opened
    a block.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    constraint: Constraint | StructuredOutput | None = None
    think_tags: bool = False
    tool_tags: bool = False
    thinking_budget: int | None = None
    begins_thinking: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether some tokens are excluded before one is drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain(self) -> bool:
        """Whether the most likely token is all that is asked for."""
        return self.greedy and not self.penalizes and not self.logit_bias and self.logprobs is None
