"""Speculative decoding: proposes draft tokens for decoding sequences, and accepts those that were sampled.

A row with drafts has the sequence's last token and k drafts, and all k + 1 positions are sampled, each with its own
noise, which depends on the seed and the position only. A draft is accepted if the same token was sampled before it. So
the tokens of an answer are those that are sampled without drafts, whatever is drafted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from typing import NamedTuple, Protocol

import mlx.core as mx

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.model_runner import DeviceError
from mlxpaged.core.engine.part import Need, Part, Tokens
from mlxpaged.core.engine.request_table import RequestTable
from mlxpaged.core.engine.running_request import RunningRequest
from mlxpaged.core.engine.sampler import SampledToken, SamplingRow
from mlxpaged.core.scheduling.scheduler import Scheduler, is_decoding
from mlxpaged.core.scheduling.sequence import Sequence
from mlxpaged.core.step import Row, Step
from mlxpaged.parts.drafting.acceptance import BY_NETWORK, MOST_DRAFTS
from mlxpaged.parts.drafting.draft_budget import DraftBudget
from mlxpaged.parts.drafting.draft_stats import NO_DRAFTS, DraftStats, GainLog
from mlxpaged.parts.drafting.network_drafters import MOST_BY_NETWORK, LaunchedDrafts, NetworkDrafter

logger = logging.getLogger(__name__)


class Drafter(Protocol):
    def begin_step(self) -> None:
        """The drafts of another step are asked for."""
        ...

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


class Drafting(Part):
    """Belongs to the engine thread. vocab_size: logits of the model. drafter: finds drafts in the text; None if only
    grammars and the network draft. network: a draft head or a smaller model; None if there is none. overlaps: whether
    the device runs a step while the host prepares the next one. clock: seconds. budget: decides how many drafts are
    verified."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: RequestTable,
        vocab_size: int,
        drafter: Drafter | None,
        network: NetworkDrafter | None,
        overlaps: bool,
        clock: Callable[[], float],
    ) -> None:
        self._overlaps, self._clock = overlaps, clock
        self._scheduler = scheduler
        self._requests = requests
        self._vocab_size = vocab_size
        self.drafter = drafter
        self.network = network
        self._network_runs = False  # whether it drafts in the next step
        config = scheduler.config
        self.budget = DraftBudget(scheduler.times.decode_seconds, config.max_draft_states if config.recurrent else None)
        self._proposals: dict[int, Proposal] = {}  # those of the next step, by sequence id
        self._launched: dict[InFlightStep, LaunchedDrafts] = {}
        self._stats = NO_DRAFTS
        self._num_accepted = 0  # drafts of the step that was read last
        self._log = GainLog(clock())

    @property
    def names(self) -> list[str]:
        """What drafts, of DRAFTERS."""
        network = [] if self.network is None else [self.network.name]
        return ["grammar", *(["ngram"] if self.drafter is not None else []), *network]

    def stats(self) -> DraftStats:
        return self._stats

    # -- a step ------------------------------------------------------------------------------------------------------

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        """Choose what the next step verifies. How many tokens a step with drafts commits is known when its tokens are
        read, and drafts follow a token that is known: so no step is in flight before or after one with drafts. But the
        text of a step's tokens is made while the device runs the next one."""
        if in_flight is not None and (in_flight.scheduled.has_drafts or in_flight in self._launched):
            return Need.COMMITTED
        started = self._clock()
        if self.choose() and in_flight is not None:
            return Need.COMMITTED
        if not self._overlaps:
            self.budget.note_choice(self._clock() - started)
        return Need.NOTHING

    def launched(self, step: Step, waited: float) -> None:
        if step.has_drafts and self._overlaps:
            self.budget.note_exposed(waited)

    def sampled(self, step: InFlightStep, rows: ListOf[SamplingRow], tokens: mx.array | None) -> None:
        launched = self._launch_network(step.scheduled, rows, tokens)
        if launched is not None:
            self._launched[step] = launched
            step.more += [] if launched.tokens is None else [launched.tokens]

    def accept(self, rows: ListOf[Row], tokens: Tokens) -> Tokens:
        with_drafts = [row for row in rows if row.drafts and row.sequence_id in tokens]
        accepted = {row.sequence_id: self._count_accepted(row, tokens[row.sequence_id]) for row in with_drafts}
        self.budget.count_step(accepted, {row.sequence_id: len(row.drafts) for row in with_drafts})
        self._num_accepted = sum(accepted.values())
        for row in with_drafts:
            self._observe(row, accepted[row.sequence_id])
        return tokens | {each: tokens[each][: number + 1] for each, number in accepted.items()}

    def timed(self, step: Step, seconds: float) -> None:
        if not all(row.decodes for row in step.rows):
            return
        rows, keys = len(step.rows), sum(row.start + 1 for row in step.rows)
        drafts = step.num_tokens - rows, sum(len(row.drafts) * (row.start + 1) for row in step.rows)
        plain = self.budget.note_step(rows, keys, drafts, seconds)
        gain = self._stats.gain.plus(step.has_drafts, rows, rows + self._num_accepted, plain * rows)
        self._stats = self._stats._replace(gain=gain)
        self._log.write(gain, self._clock())

    def committed(self, step: InFlightStep, tokens: Tokens) -> None:
        if (launched := self._launched.pop(step, None)) is not None:
            self._draft_further({each: len(found) - 1 for each, found in tokens.items() if found}, launched)

    def discard(self) -> None:
        self._launched.clear()

    # -- what is drafted ---------------------------------------------------------------------------------------------

    def choose(self) -> bool:
        """Give running sequences the drafts of the next step. Returns whether any has one. If a step is in flight, its
        tokens are missing here: process them, and choose again."""
        decoding = list(filter(is_decoding, self._scheduler.running))
        contexts = [len(sequence.token_ids) for sequence in decoding]
        prompts = self._scheduler.times.seconds_for_prompts(contexts, self._num_prompts())
        can_pay = self.budget.begin_step(contexts, prompts)
        if self.network is not None:
            self._network_runs = can_pay and self._network_pays(self.network, decoding)
        self._proposals = {}
        for sequence in decoding:
            sequence.drafts = ()
        if not can_pay:
            return False
        if self.drafter is not None:
            self.drafter.begin_step()
        searched: list[int] = []
        proposals = [self._in_vocabulary(self._propose(sequence, searched)) for sequence in decoding]
        if not any(proposal.drafts for proposal in proposals):
            self.budget.choose_none(searched)
            return False
        chances = [self._chances(sequence, proposal) for sequence, proposal in zip(decoding, proposals, strict=True)]
        costs = [0.0 if each.match != BY_NETWORK or self.network is None else self.network.cost for each in proposals]
        ids = [sequence.sequence_id for sequence in decoding]
        lengths = self.budget.choose(ids, contexts, chances, costs, searched)
        for sequence, proposal, length in zip(decoding, proposals, lengths, strict=True):
            if length:
                sequence.drafts = proposal.drafts[:length]
                self._proposals[sequence.sequence_id] = proposal
        return any(lengths)

    def _num_prompts(self) -> int:
        """Prompts that the next step may compute a part of."""
        running = self._scheduler.running
        free = self._scheduler.config.max_num_seqs - len(running)
        return sum(each.num_uncomputed_tokens > 1 for each in running) + min(free, len(self._scheduler.waiting))

    def _chances(self, sequence: Sequence, proposal: Proposal) -> list[float]:
        count = len(proposal.drafts)
        if proposal.is_certain or not count:
            return [1.0] * count
        return self.budget.of(sequence.sequence_id).chances(proposal.match, count)

    def _network_pays(self, network: NetworkDrafter, decoding: ListOf[Sequence]) -> bool:
        """Whether the network is to draft after the next step: its drafts are likely to be verified, or are to be tried
        again. Before a sequence decodes, whether drafts that are all accepted would be worth it."""
        if not decoding:
            return any(self.budget.verified([1], [[1.0]], [network.cost]))
        acceptances = [self.budget.of(sequence.sequence_id) for sequence in decoding]
        contexts, costs = [len(sequence.token_ids) for sequence in decoding], [network.cost] * len(decoding)
        if any(each.is_probe_due for each in acceptances):
            return any(self.budget.verified(contexts, [[1.0]] * len(decoding), costs))
        chances = [each.chances(BY_NETWORK, MOST_BY_NETWORK) for each in acceptances]
        return any(self.budget.verified(contexts, chances, costs))

    def _launch_network(
        self, step: Step, sampling: ListOf[SamplingRow], tokens: mx.array | None
    ) -> LaunchedDrafts | None:
        """Let the head or the smaller model begin after a step that was launched last, if that pays."""
        if self.network is None:
            return None
        if not self._network_runs:
            self.network.skip(step)
            return None
        try:
            return self.network.launch(step, sampling, tokens, self._scheduler.sequences)
        except Exception:
            self._give_up()
            return None

    def _draft_further(self, accepted: Mapping[int, int], launched: LaunchedDrafts) -> None:
        """Let it draft after the tokens that a step has committed. accepted: its accepted drafts, by sequence. Raises
        DeviceError."""
        if self.network is None:
            return
        running = [self._requests.by_sequence[each] for each in accepted if each in self._requests.by_sequence]
        running = [each for each in running if is_decoding(each.sequence) and each.sequence in self._scheduler.running]
        contexts = [len(each.sequence.token_ids) for each in running]
        chances = [self.budget.of(each.sequence.sequence_id).chances(BY_NETWORK, MOST_BY_NETWORK) for each in running]
        try:
            lengths = self.budget.verified(contexts, chances, [self.network.cost] * len(running)) if running else []
            self.network.draft(launched, accepted, running, lengths)
        except DeviceError:
            raise
        except Exception:
            self._give_up()

    def _give_up(self) -> None:
        logger.exception("the draft head or model fails: nothing is drafted by it from now on")
        self.network = None

    def _propose(self, sequence: Sequence, searched: list[int]) -> Proposal:
        """searched: the sequence is added if its text was searched."""
        running = self._requests.by_sequence[sequence.sequence_id]
        searches = self.drafter is not None and self.budget.searches(sequence.sequence_id)
        if not searches and self.network is None and running.matcher is None and running.thinking is None:
            return NOTHING
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
        found = []
        if self.drafter is not None and searches:
            searched.append(sequence.sequence_id)
            found.append(Proposal(*self.drafter.propose(running, most)))
        if self.network is not None:
            found.append(Proposal(self.network.propose(sequence, most), BY_NETWORK, self.network.name))
        if matcher is not None:
            found = [each._replace(drafts=each.drafts[: matcher.count_allowed(each.drafts)]) for each in found]
        if len(found) < 2:
            return found[0] if found else NOTHING
        return max(found, key=lambda each: sum(self._chances(sequence, each)))

    def _in_vocabulary(self, proposal: Proposal) -> Proposal:
        """The drafts before the first one that the model does not know: its tokenizer may have more tokens than it has
        embeddings, and so may what a grammar forces, and a prediction."""
        if max(proposal.drafts, default=0) < self._vocab_size:
            return proposal
        known = itertools.takewhile(lambda token: token < self._vocab_size, proposal.drafts)
        return proposal._replace(drafts=list(known))

    def _count_accepted(self, row: Row, sampled: ListOf[SampledToken]) -> int:
        """Drafts that equal what was sampled, up to one that ends the answer."""
        if (running := self._requests.by_sequence.get(row.sequence_id)) is None:
            return 0
        ends, before = running.sequence.finish_reason_after, running.sequence.num_output_tokens
        accepted = 0
        while (
            accepted < len(row.drafts)
            and sampled[accepted].token_id == row.drafts[accepted]
            and ends(row.drafts[accepted], before + accepted + 1) is None
        ):
            accepted += 1
        return accepted

    def _observe(self, row: Row, accepted: int) -> None:
        if (running := self._requests.by_sequence.get(row.sequence_id)) is None:
            return
        running.num_drafted += len(row.drafts)
        running.num_accepted += accepted
        proposal = self._proposals.get(row.sequence_id, NOTHING)
        self._stats = self._stats.more(proposal.drafter, len(row.drafts), accepted)
        acceptance = self.budget.of(row.sequence_id)
        if proposal.is_certain:
            acceptance.advance(accepted)
        else:
            acceptance.observe(proposal.match, len(row.drafts), accepted)

    def forget(self, sequence_id: int) -> None:
        self.budget.forget(sequence_id)
        if self.drafter is not None:
            self.drafter.forget(sequence_id)
        if self.network is not None:
            self.network.forget(sequence_id)
