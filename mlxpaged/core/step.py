"""What a step runs: the record that goes from the scheduler to the model runner of each rank. It is for all rooms.

It has neither MLX nor NumPy, because the flags import the scheduler's priorities.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mlxpaged.core.blocks.table_rows import IntArray

PENDING = -1
"""Stands for a token that a step in flight samples. The next step is scheduled before the host has read that token."""

FIRST_CONTENT_ID = 2**32
"""From here on, a token id stands for a row of an image's features. Such ids are equal only for the same row of the
same image, so that the prefix cache compares images as it compares text. The model gets token 0 there."""


class Row(NamedTuple):
    """Tokens `start` to `start + num_tokens` of a sequence, and all that a step must know to compute them.

    token_ids: the tokens, or ids of content; the last one may be PENDING.
    logits: the positions whose logits are wanted.
    num_sampled: how many of these, at the end, are sampled from. The others are for the prompt's log-probabilities.
    restore: the checkpoint of the recurrent state to start from; None to go on from the sequence's own state.
    checkpoints: (position, id) of those to take, in order; start < position <= start + num_tokens.
    adapter: the adapter that computes the row; None for the model without one.
    request_id: for the log, on rank 0.
    tables: [G, b], the block ids for each cache group, then UNUSED. All rows of a step have the same b.
    shifts: (position, shift) in order: from this position on, the rotary embedding gets position + shift for a token of
    text. Empty for most models.
    spans: (start, end) of the images whose tokens see one another and that the row has several tokens of. It has all
    tokens from its first one of such an image to the end of the image. Empty for most models.
    """

    sequence_id: int
    start: int
    token_ids: Sequence[int]
    logits: range = range(0)
    num_sampled: int = 0
    restore: int | None = None
    checkpoints: Sequence[Sequence[int]] = ()
    adapter: str | None = None
    request_id: str = ""
    tables: IntArray | None = None
    shifts: Sequence[tuple[int, int]] = ()
    spans: Sequence[tuple[int, int]] = ()

    @property
    def shift(self) -> int:
        """That of its first token."""
        return next((shift for position, shift in reversed(self.shifts) if position <= self.start), 0)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def context_len(self) -> int:
        """Tokens of context, including this step's."""
        return self.start + len(self.token_ids)

    @property
    def samples(self) -> bool:
        return self.num_sampled > 0

    @property
    def decodes(self) -> bool:
        """Whether it is computed as decoding rows: it is one token, or all its tokens are sampled from."""
        return len(self.token_ids) == max(1, self.num_sampled)

    @property
    def drafts(self) -> Sequence[int]:
        """Those of its tokens that may be rejected."""
        return self.token_ids[1:] if self.num_sampled > 1 else ()

    @property
    def sampled(self) -> range:
        """The positions of the tokens that are sampled."""
        end = self.logits.stop + 1
        return range(end - self.num_sampled, end)

    @property
    def prompt_logprobs(self) -> range:
        """The positions of the prompt tokens whose log-probabilities are computed. The logits for each are those of the
        token before it."""
        return range(self.logits.start + 1, self.logits.stop + 1 - self.num_sampled)

    def tokens(self) -> list[Row]:
        """A row for each of its tokens, without checkpoints."""
        first = self.logits.stop - self.num_sampled
        return [
            self._replace(
                start=position,
                token_ids=[token],
                logits=range(position, position + (position in self.logits)),
                num_sampled=int(position >= first and position in self.logits),
                checkpoints=(),
            )
            for position, token in enumerate(self.token_ids, self.start)
        ]


@dataclass(frozen=True)
class BlockMoves:
    """KV blocks to move before a step runs.

    swap_out: (block, slot); copies: (source, target) blocks; swap_in: (slot, block). They run in this order, so that no
    move reads what another one has overwritten. states_out: (sequence id, its tokens, slots) of recurrent states;
    states_in: (slots, sequence id).
    """

    swap_out: Sequence[tuple[int, int]] = ()
    copies: Sequence[tuple[int, int]] = ()
    swap_in: Sequence[tuple[int, int]] = ()
    states_out: Sequence[tuple[int, int, list[int]]] = ()
    states_in: Sequence[tuple[list[int], int]] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in or self.states_out or self.states_in)


@dataclass(frozen=True)
class Step:
    """The rows of one forward pass: decoding sequences first, then prompt chunks.

    A row may attend to blocks that an earlier row writes. So rows that run again after a failure keep their order.

    num_repeats: None, unless the step is a tile of a batch-invariant engine. Then each row has one token, and this many
    rows at the end are the one before them again.
    """

    rows: Sequence[Row]
    moves: BlockMoves = BlockMoves()
    num_repeats: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def query_lens(self) -> list[int]:
        """The number of tokens of each row."""
        return [len(row.token_ids) for row in self.rows]

    @functools.cached_property
    def context_lens(self) -> list[int]:
        """The tokens of context of each row, including this step's."""
        return [row.start + len(row.token_ids) for row in self.rows]

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def has_drafts(self) -> bool:
        """Whether a row samples several tokens."""
        return self.num_sampled > sum(row.samples for row in self.rows)

    def with_drafts_as_rows(self) -> Step:
        """Returns the step with a row for each token of the rows that decode: a draft is computed like a sequence that
        has the same blocks. So a step with drafts has the shape of one without."""
        if len(self.rows) == self.num_tokens or not self.has_drafts:
            return self
        return Step([one for row in self.rows for one in (row.tokens() if row.decodes else (row,))], self.moves)

    @functools.cached_property
    def num_sampled(self) -> int:
        """The number of tokens that are sampled."""
        return sum(row.num_sampled for row in self.rows)

    @functools.cached_property
    def token_ids(self) -> list[int]:
        """Those of all rows, one after the other."""
        return list(itertools.chain.from_iterable([row.token_ids for row in self.rows]))

    @functools.cached_property
    def is_shifted(self) -> bool:
        """Whether rows have shifts."""
        return any(row.shifts for row in self.rows)

    @functools.cached_property
    def shows_images(self) -> bool:
        """Whether it has rows of images."""
        return max(self.token_ids) >= FIRST_CONTENT_ID

    @functools.cached_property
    def spans(self) -> dict[int, Sequence[tuple[int, int]]]:
        """Those of the rows that have any, by the indices of the rows."""
        return {i: row.spans for i, row in enumerate(self.rows) if row.spans}

    @property
    def sequence_ids(self) -> list[int]:
        return [row.sequence_id for row in self.rows]
