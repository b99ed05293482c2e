"""How the tokens of one request are sampled, and when its answer ends."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mlxpaged.core.engine.constraint import Constraint, StructuredOutput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from mlxpaged.core.text.answer_parser import AnswerForm

MIN_TEMPERATURE = 1e-5
"""Below it, only the most likely token can be sampled, and dividing float32 logits by the temperature can overflow."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters. The API checks their ranges."""

    max_tokens: int | None = None  # None for as many as context and pool allow; 0: only the prompt is computed
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 for all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # for tokens of prompt and answer (CTRL, Keskar et al. 2019)
    repetition_context_size: int | None = None  # the penalty is for so many of the last tokens, at least 2; None: all
    presence_penalty: float = 0.0  # subtracted once for tokens of the answer, as OpenAI defines it
    frequency_penalty: float = 0.0  # subtracted per occurrence in the answer, as OpenAI defines it
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None for a random one
    logprobs: int | None = None  # how many of the most likely tokens to report; None for no log-probabilities
    prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    prompt_logprobs_from: int = 1  # with `prompt_logprobs`: the first token that has some; those before may be cached
    logprob_token_ids: tuple[int, ...] = ()  # with `logprobs`: report these tokens instead of the most likely ones
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0  # tokens before a stop token or a stop string may end the answer
    end_loops: bool | None = None  # whether an answer ends that repeats itself; None: as the server is set
    # An answer with a constraint ends when nothing can follow, even with ignore_eos or min_tokens.
    constraint: Constraint | StructuredOutput | None = None
    # What divides the answer: then stop strings hold for its text, not for its thoughts and calls.
    answer_form: AnswerForm | None = None
    think_tags: bool = False  # whether the text shows the special tokens of thinking
    tool_tags: bool = False  # whether the text shows the special tokens of tool calls
    continues_text: bool = False  # whether the answer goes on with the prompt's text: then it may begin with a space
    thinking_budget: int | None = None  # most tokens in think blocks
    close_thought: bool = False  # whether an end token in the first think block closes it, and the answer begins
    begins_thinking: bool = False  # whether the prompt opened a think block
    predicted: tuple[int, ...] = ()  # what the answer will be for the most part: draft tokens are taken from it too
    speculative: bool | int | None = None  # most draft tokens that a step verifies; None or True: no limit of its own

    @property
    def greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def filters(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens before sampling."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @functools.cached_property
    def bias(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """`logit_bias` as arrays: the token ids, and what is added to the logit of each. They are made once: the thread
        of all requests needs them in each step."""
        import numpy as np  # the command line needs the fields of this class, and no numpy

        ids = np.fromiter(self.logit_bias.keys(), np.int32, len(self.logit_bias))
        return ids, np.fromiter(self.logit_bias.values(), np.float32, len(self.logit_bias))

    @functools.cached_property
    def plain(self) -> bool:
        """Whether the sampler only has to take the most likely token."""
        return self.greedy and not self.penalizes and not self.logit_bias and self.logprobs is None
