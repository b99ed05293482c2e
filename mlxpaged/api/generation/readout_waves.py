"""Decides which rows of a readout run first, so that each begins exactly where what it shares with others ends.

Sequences in one step share whole blocks. A block that is not full is shared by a copy, after the step that computes it.
So there are waves of rows, each after the one before it: prefixes that several prompts share, the prompts, and the
paths of their longer answers. A wave is left out if it saves too little.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mlxpaged.core.engine.readout import Readout
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.vision.image import PromptImage

LEAST_SAVED = 64
"""Tokens that a further wave must save: it has steps of its own."""
NO_TOKEN = SamplingParams(max_tokens=0, temperature=0.0)
"""The parameters of a row that only computes its prompt."""


@dataclass(frozen=True)
class ReadoutPrompt:
    """token_ids: up to the beginning of the answer. images: that it shows. shared: the tokens at its beginning that
    other prompts share, all of which have the same object. They count once against the limit of a key."""

    token_ids: list[int]
    readout: Readout
    images: tuple[PromptImage, ...] = ()
    shared: Sequence[int] = ()

    @property
    def num_shared(self) -> int:
        return len(self.shared)


class EngineRow(NamedTuple):
    """A request of the engine. num_counted: tokens that count against the key's limit. prompts: the indices of those
    that begin with it, or of the one that it reads. is_whole: whether its tokens are exactly a prompt that it reads."""

    token_ids: list[int]
    params: SamplingParams
    images: tuple[PromptImage, ...]
    num_counted: int
    prompts: Sequence[int]
    reads: bool = True
    is_whole: bool = False


class Prefix(NamedTuple):
    """Tokens that several prompts share. level: how many shorter ones are computed before it."""

    length: int
    prompts: Sequence[int]
    level: int


def waves_of(prompts: Sequence[ReadoutPrompt], block_size: int) -> list[list[EngineRow]]:
    """Returns the rows of each wave. Those of a prompt are in the order of its readout."""
    found = list[list[EngineRow]]()
    for prefix in sorted(shared_prefixes(prompts, block_size), key=lambda each: each.level):
        first = prompts[prefix.prompts[0]]
        if prefix.level == len(found):
            found.append([])
        tokens = first.token_ids[: prefix.length]
        found[-1].append(EngineRow(tokens, NO_TOKEN, first.images, 0, prefix.prompts, reads=False))
    saved = sum((len(prompt.readout.rows) - 1) * (len(prompt.token_ids) % block_size) for prompt in prompts)
    whole, paths = list[EngineRow](), list[EngineRow]()
    for index, prompt in enumerate(prompts):
        root, *others = rows_of(prompt, index)
        whole.append(root)
        (paths if saved >= LEAST_SAVED else whole).extend(others)
    found += [wave for wave in (whole, paths) if wave]
    if found:  # what is shared counts once
        first_row = found[0][0]
        most = max(prompt.num_shared for prompt in prompts)
        found[0][0] = first_row._replace(num_counted=first_row.num_counted + most)
    return found


def rows_of(prompt: ReadoutPrompt, index: int) -> Iterator[EngineRow]:
    """Yields the row of a prompt, and those of its paths."""
    size = len(prompt.token_ids)
    for row in prompt.readout.rows:
        counted = len(row.path) or size - prompt.num_shared
        tokens, is_whole = [*prompt.token_ids, *row.path], not row.path
        yield EngineRow(tokens, row.params(size), prompt.images, counted, (index,), is_whole=is_whole)


def shared_prefixes(prompts: Sequence[ReadoutPrompt], block_size: int) -> list[Prefix]:
    """Returns the prefixes that are worth a row: the prompts that share one save LEAST_SAVED tokens, beside the whole
    blocks that they share in any case."""
    sharing: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.shared:
            sharing.setdefault(id(prompt.shared), []).append(index)
    found, pending = list[Prefix](), list[Prefix]()  # pending: (equal tokens, prompts in order, level)
    for indices in sharing.values():
        size = prompts[indices[0]].num_shared
        ordered = sorted((prompts[index].token_ids[size:], index) for index in indices)
        pending.append(Prefix(size, [index for _, index in ordered], 0))
    known = dict.fromkeys(range(len(prompts)), 0)  # by prompt: the tokens of the longest prefix that is found
    while pending:
        length, members, level = pending.pop()
        first, last = (prompts[index].token_ids for index in (members[0], members[-1]))
        while length < min(len(first), len(last)) and first[length] == last[length]:
            length += 1
        if (len(members) - 1) * (length - max(known[members[0]], length - length % block_size)) >= LEAST_SAVED:
            found.append(Prefix(length, members, level))
            known.update(dict.fromkeys(members, length))
            level += 1
        following = [(prompts[index].token_ids[length : length + 1], index) for index in members]
        for token, branch in groupby(following, key=itemgetter(0)):
            if token and len(others := [index for _, index in branch]) > 1:
                pending.append(Prefix(length, others, level))
    return found
