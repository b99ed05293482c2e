"""Speculative decoding: proposes draft tokens for decoding sequences, and accepts those that were sampled.

A row with drafts has the sequence's last token and k drafts, and all k + 1 positions are sampled, each with its own
noise, which depends on the seed and the position only. A draft is accepted if the same token was sampled before it. So
the tokens of an answer are those that are sampled without drafts, whatever is drafted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlxpaged.engine.model_runner import DeviceError
from mlxpaged.engine.network_drafters import MOST_BY_NETWORK, LaunchedDrafts, NetworkDrafter
from mlxpaged.engine.request_table import RequestTable
from mlxpaged.engine.running_request import RunningRequest
from mlxpaged.engine.sampler import SampledToken, SamplingRow
from mlxpaged.engine.status import NO_DRAFTS
from mlxpaged.scheduler.draft_budget import (
    BY_NETWORK,
    CLEAR_GAIN,
    MOST_DRAFTS,
    PRIORS,
    TIME_AGAIN,
    Acceptance,
    ProbeBudget,
    draft_lengths,
    gain_of,
    of_few,
)
from mlxpaged.scheduler.row_table import SHORTEST
from mlxpaged.scheduler.scheduler import Scheduler, is_decoding
from mlxpaged.scheduler.sequence import Sequence
from mlxpaged.step import Row, Step

logger = logging.getLogger(__name__)

MOST_DRAFT_ROWS = 64
"""Drafts of a step. Times of steps are measured up to 128 rows."""


ASK_AGAIN = 32
"""Steps of as many sequences after which it is asked again whether drafts could be worth verifying at all."""

PATIENCE, SEARCH_EVERY = 32, 4
"""After so many steps of which none verified a draft, the text is searched in every fourth step only."""

EXPOSED_SHARE = 0.1
"""What the latest step counts in the time that the device waits. The average begins at 0, so that drafts are tried."""

MOST_EXPOSED = 0.01
"""Seconds. More is a pause of the process."""


class Drafter(Protocol):
    def propose(self, running: RunningRequest, most: int) -> tuple[list[int], int]:
        """Returns up to `most` tokens that may come next, and how many tokens of the text they were found by."""
        ...

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        ...


class Proposal(NamedTuple):
    """Tokens that may come next. match: how many tokens of the text they were found by, or BY_NETWORK. drafter: one of
    DRAFTERS."""

    drafts: list[int]
    match: int = 0
    drafter: str = "ngram"

    @property
    def is_certain(self) -> bool:
        """Whether no other tokens are allowed."""
        return self.drafter == "grammar"


NOTHING = Proposal([])

Lengths = Callable[[ListOf[int], ListOf[ListOf[float]], ListOf[float], ListOf[float]], list[int]]
"""Contexts, chances, costs and leads of all decoding sequences -> drafts of each, see `draft_lengths`."""


class Drafting:
    """Belongs to the engine thread. drafter: finds drafts in the text; None if only grammars and the network draft.
    network: a draft head or a smaller model; None if there is none. lengths: decides how many drafts are verified, by
    the times of steps if it is not replaced."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: RequestTable,
        drafter: Drafter | None,
        network: NetworkDrafter | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self.drafter = drafter
        self.network = network
        self.lengths: Lengths = self._fastest
        self._acceptance: dict[int, Acceptance] = {}
        self._shared = list(PRIORS)
        self._proposals: dict[int, Proposal] = {}  # those with drafts in the next step, by sequence id
        self._could_pay, self._last_batch, self._steps_left = False, -1, 0
        self._expected: dict[int, float] = {}  # tokens of these drafts
        self._with_drafts = self._without_drafts = 0  # steps in a row
        self._probes = ProbeBudget()
        self.stats = NO_DRAFTS
        self.exposed = 0.0  # seconds in which the device waits before a step with drafts, though steps could overlap

    @property
    def names(self) -> list[str]:
        """What drafts, of DRAFTERS."""
        network = [] if self.network is None else [self.network.name]
        return ["grammar", *(["ngram"] if self.drafter is not None else []), *network]

    def choose(self) -> bool:
        """Give running sequences the drafts of the next step. Returns whether any has one. If a step is in flight, its
        tokens are missing here: process them, and choose again."""
        decoding = list(filter(is_decoding, self._scheduler.running))
        can_pay = self._can_pay([len(sequence.token_ids) for sequence in decoding])
        if self.network is not None:
            self.network.runs = can_pay and self._network_pays(self.network, decoding)
        proposals = [self._propose(sequence) for sequence in decoding] if can_pay else []
        self._proposals.clear()
        self._expected.clear()
        if not any(proposal.drafts for proposal in proposals):
            for sequence in decoding:
                sequence.drafts = ()
            return False
        chances = [self._chances(sequence, proposal) for sequence, proposal in zip(decoding, proposals, strict=True)]
        contexts = [len(sequence.token_ids) for sequence in decoding]
        costs = [0.0 if each.match != BY_NETWORK or self.network is None else self.network.cost for each in proposals]
        leads = [self._acceptance_of(sequence).lead for sequence in decoding]
        lengths = self.lengths(contexts, chances, costs, leads)
        self._add_probe(decoding, contexts, [len(each) for each in chances], costs, leads, lengths)
        if self._scheduler.config.recurrent:
            lengths = of_few(lengths, chances, self._scheduler.config.max_draft_states)
        if self._is_plain_due(lengths, contexts, chances):
            lengths = [0] * len(decoding)
        for sequence, proposal, chance, length in zip(decoding, proposals, chances, lengths, strict=True):
            sequence.drafts = proposal.drafts[:length]
            self._expected[sequence.sequence_id] = sum(chance[:length])
            self._proposals[sequence.sequence_id] = proposal
        return any(lengths)

    def _can_pay(self, contexts: ListOf[int]) -> bool:
        """Whether drafts could be worth verifying if all were accepted. The answer is kept for some steps: where it is
        no, nothing is searched for drafts."""
        if len(contexts) != self._last_batch or self._steps_left == 0:
            self._last_batch, self._steps_left = len(contexts), ASK_AGAIN
            count = max(1, len(contexts))
            self._could_pay = any(self.lengths(contexts or [1], [[1.0] * MOST_DRAFTS] * count, [0.0] * count, []))
        self._steps_left -= 1
        return self._could_pay

    def _is_plain_due(self, lengths: ListOf[int], contexts: ListOf[int], chances: ListOf[ListOf[float]]) -> bool:
        """Whether the step goes without these drafts, so that its time is known."""
        if not any(lengths) or self._with_drafts < TIME_AGAIN or (seconds := self._scheduler.decode_seconds()) is None:
            return False
        return gain_of(lengths, contexts, chances, seconds) < CLEAR_GAIN

    def note_exposed(self, seconds: float) -> None:
        """The device has waited for the host before a step with drafts."""
        self.exposed += EXPOSED_SHARE * (min(seconds, MOST_EXPOSED) - self.exposed)

    def _chances(self, sequence: Sequence, proposal: Proposal) -> list[float]:
        count = len(proposal.drafts)
        if proposal.is_certain or not count:
            return [1.0] * count
        return self._acceptance_of(sequence).chances(proposal.match, count)

    def _network_pays(self, network: NetworkDrafter, decoding: ListOf[Sequence]) -> bool:
        """Whether the network is to draft after the next step: its drafts are likely to be verified, or are to be tried
        again. Before a sequence decodes, whether drafts that are all accepted would be worth it."""
        if not decoding:
            return any(self.lengths([1], [[1.0]], [network.cost], []))
        acceptances = [self._acceptance_of(sequence) for sequence in decoding]
        contexts, costs = [len(sequence.token_ids) for sequence in decoding], [network.cost] * len(decoding)
        if any(each.is_probe_due for each in acceptances):
            return any(self.lengths(contexts, [[1.0]] * len(decoding), costs, []))
        chances = [each.chances(BY_NETWORK, MOST_BY_NETWORK) for each in acceptances]
        return any(self.lengths(contexts, chances, costs, []))

    def launch_network(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None
    ) -> LaunchedDrafts | None:
        """Let the head or the smaller model begin after a step that was launched last, if that pays."""
        if self.network is None:
            return None
        if not self.network.runs:
            self.network.skip(step)
            return None
        try:
            return self.network.launch(step, sampling, tokens, self._scheduler.sequences)
        except Exception:
            self._give_up()
            return None

    def draft_further(self, accepted: Mapping[int, int], launched: LaunchedDrafts) -> None:
        """Let it draft after the tokens that a step has committed. accepted: its accepted drafts, by sequence. Raises
        DeviceError."""
        if self.network is None:
            return
        running = [self._requests.by_sequence[each] for each in accepted if each in self._requests.by_sequence]
        running = [each for each in running if is_decoding(each.sequence) and each.sequence in self._scheduler.running]
        contexts = [len(each.sequence.token_ids) for each in running]
        chances = [self._acceptance_of(each.sequence).chances(BY_NETWORK, MOST_BY_NETWORK) for each in running]
        try:
            lengths = self.lengths(contexts, chances, [self.network.cost] * len(running), []) if running else []
            self.network.draft(launched, accepted, running, lengths)
        except DeviceError:
            raise
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        logger.exception("the draft head or model fails: nothing is drafted by it from now on")
        self.network = None

    def _add_probe(
        self,
        decoding: ListOf[Sequence],
        contexts: ListOf[int],
        proposed: ListOf[int],
        costs: ListOf[float],
        leads: ListOf[float],
        lengths: list[int],
    ) -> None:
        """Let a sequence whose drafts were not worth verifying for long have one, if that would be worth it with drafts
        that are all accepted."""
        for i, sequence in enumerate(decoding):
            if proposed[i] and not lengths[i] and self._acceptance_of(sequence).is_probe_due:
                hopeful = [[1.0] * min(1, count) for count in proposed]
                length = min(1, self.lengths(contexts, hopeful, costs, leads)[i])
                seconds = self._scheduler.decode_seconds()
                if length and seconds is not None and self._probes.spend(contexts, i, seconds):
                    lengths[i] = length
                return

    def _propose(self, sequence: Sequence) -> Proposal:
        running = self._requests.by_sequence[sequence.sequence_id]
        left = sequence.max_tokens - (len(sequence.token_ids) - sequence.num_prompt_tokens) - 1
        asked = running.request.params.speculative
        most = min(left, MOST_DRAFTS if asked is None or asked is True else int(asked))
        if most <= 0 or not sequence.num_output_tokens or sequence.num_step_failures:
            return NOTHING
        matcher = running.matcher
        if matcher is None and running.thinking is not None and (tag := running.thinking.closing()[:most]):
            return Proposal(tag, drafter="grammar")
        if matcher is not None and (forced := matcher.forced()[:most]):
            return Proposal(forced[: matcher.count_allowed(forced)], drafter="grammar")
        searches = self._without_drafts < PATIENCE or self._without_drafts % SEARCH_EVERY == 0
        found = [Proposal(*self.drafter.propose(running, most))] if self.drafter is not None and searches else []
        if self.network is not None:
            found.append(Proposal(self.network.propose(sequence, most), BY_NETWORK, self.network.name))
        if matcher is not None:
            found = [each._replace(drafts=each.drafts[: matcher.count_allowed(each.drafts)]) for each in found]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return max(found, key=lambda each: sum(self._chances(sequence, each)))

    def _fastest(
        self, contexts: ListOf[int], chances: ListOf[ListOf[float]], costs: ListOf[float], leads: ListOf[float]
    ) -> list[int]:
        seconds = self._scheduler.decode_seconds()
        if seconds is None:
            return [0] * len(contexts)
        most = max(1, MOST_DRAFT_ROWS // len(contexts))
        return draft_lengths(contexts, [each[:most] for each in chances], seconds, costs, self.exposed, leads)

    def _acceptance_of(self, sequence: Sequence) -> Acceptance:
        acceptance = self._acceptance.get(sequence.sequence_id)
        if acceptance is None:
            acceptance = self._acceptance[sequence.sequence_id] = Acceptance(self._shared)
        return acceptance

    def note_seconds(self, step: Step, seconds: float) -> None:
        """A step has taken so long. Those that decode have waited for its drafts."""
        self._with_drafts = self._with_drafts + 1 if step.has_drafts else 0
        self._without_drafts = 0 if step.has_drafts else self._without_drafts + 1
        self._probes.save()
        if not step.has_drafts or not all(row.decodes for row in step.rows):
            return
        if (estimate := self._scheduler.decode_seconds()) is None:
            return
        plain = max(estimate(len(step.rows), sum(row.start + 1 for row in step.rows)), SHORTEST)
        for row in step.rows:
            if (acceptance := self._acceptance.get(row.sequence_id)) is not None:
                acceptance.wait((seconds + self.exposed) / plain - 1 - self._expected.get(row.sequence_id, 0.0))

    def accept(self, row: Row, sampled: list[SampledToken]) -> list[SampledToken]:
        """Returns the first of the tokens that a row has sampled: up to the first one that is not the next draft, or
        that ends the answer."""
        running = self._requests.by_sequence.get(row.sequence_id)
        drafts = row.drafts
        if running is None or not drafts:
            if (acceptance := self._acceptance.get(row.sequence_id)) is not None:
                acceptance.observe(0, 0, 0)
            return sampled
        ends, before = running.sequence.finish_reason_after, running.sequence.num_output_tokens
        accepted = 0
        while (
            accepted < len(drafts)
            and sampled[accepted].token_id == drafts[accepted]
            and ends(drafts[accepted], before + accepted + 1) is None
        ):
            accepted += 1
        running.num_drafted += len(drafts)
        running.num_accepted += accepted
        proposal = self._proposals.get(row.sequence_id, NOTHING)
        self.stats = self.stats.more(proposal.drafter, len(drafts), accepted)
        if not proposal.is_certain:
            self._acceptance_of(running.sequence).observe(proposal.match, len(drafts), accepted)
        return sampled[: accepted + 1]

    def forget(self, sequence_id: int) -> None:
        self._acceptance.pop(sequence_id, None)
        if self.drafter is not None:
            self.drafter.forget(sequence_id)
        if self.network is not None:
            self.network.forget(sequence_id)
