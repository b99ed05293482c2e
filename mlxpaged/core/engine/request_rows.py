"""What the sampler gets of a step's rows: how their requests are sampled, and what grammars allow."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf

from mlxpaged.core.engine.matcher import Mask, Matcher, Matchers
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import SamplingRow
from mlxpaged.core.step import Row, Step


class RequestRows:
    """Belongs to the engine thread."""

    def __init__(self, requests: RequestTable, grammars: Matchers) -> None:
        self._requests = requests
        self._grammars = grammars

    def need_tokens(self, rows: ListOf[Row]) -> bool:
        """Whether some of them can be sampled only when all earlier tokens are known."""
        return any(self._requests.by_sequence[row.sequence_id].needs_tokens for row in rows)

    def sampled(self, rows: ListOf[Row]) -> list[SamplingRow]:
        """One for each position that is sampled, in the order of the rows."""
        running = [(self._requests.by_sequence[row.sequence_id], row) for row in rows]
        masks = self._masks([(each.matcher, each, row) for each, row in running if each.matcher is not None])
        return [
            each.sampling_row(at, None if each.matcher is None else next(masks), row.drafts[:number])
            for each, row in running
            for number, at in enumerate(row.sampled)
        ]

    def _masks(self, constrained: ListOf[tuple[Matcher, RunningRequest, Row]]) -> Iterator[Mask]:
        """Yields what the grammars allow at each position. The masks of rows without drafts are made together."""
        single = [
            (matcher, each.forbidden(row.sampled.start)) for matcher, each, row in constrained if row.num_sampled == 1
        ]
        together = iter(self._grammars.masks(single) if single else ())
        for matcher, each, row in constrained:
            if row.num_sampled == 1:
                yield next(together)
            else:
                yield from self._grammars.masks_along(matcher, row.drafts, list(map(each.forbidden, row.sampled)))

    def of_prompts(self, step: Step, num_logits: int, least_top: int) -> tuple[list[int], int]:
        """The prompt tokens that the last rows of logits are for, and how many of the most likely ones to report, at
        least `least_top`. num_logits: rows of logits of the step."""
        if num_logits == max(1, step.num_sampled):
            return [], 0
        requests = self._requests.by_sequence
        asked = [(row.prompt_logprobs, requests[row.sequence_id]) for row in step.rows if row.prompt_logprobs]
        top = max(least_top, *(each.num_top for _, each in asked))
        return [each.sequence.token_ids[position] for positions, each in asked for position in positions], top
