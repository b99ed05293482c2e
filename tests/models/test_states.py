"""Recurrent states in ragged steps: the groups of a step, and states that are those of the sequences alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.attention.layer import StepContext
from mlxpaged.attention.token_groups import StateGroup, make_groups
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.step import Row, Step
from mlxpaged.models.loader import ServedModel, load_model
from mlxpaged.models.states.states import RecurrentLayer
from tests.models.architectures import make_architecture

BLOCK_SIZE = 8
BLOCKS_EACH = 4


# -- groups ----------------------------------------------------------------------------------------------------------


def spans(groups: Iterable[StateGroup]) -> list[tuple[int, int, list[int]]]:
    return [(group.first, group.last, group.sequence_ids) for group in groups]


def tokens(sequence_id: int, start: int, count: int, **more: Any) -> Row:
    return Row(sequence_id, start, [0] * count, **more)


def test_decoding_rows_are_one_group_and_each_chunk_is_alone() -> None:
    rows = [tokens(3, 7, 1), tokens(5, 9, 1), tokens(1, 0, 6), tokens(2, 4, 3)]
    groups = make_groups(rows)
    assert spans(groups) == [(0, 2, [3, 5]), (2, 8, [1]), (8, 11, [2])]
    assert [group.is_rows for group in groups] == [True, False, False]
    assert [group.is_fresh for group in groups] == [False, True, False]


def test_a_chunk_is_cut_at_its_checkpoints() -> None:
    groups = make_groups([tokens(1, 4, 20, restore=6, checkpoints=[(8, 0), (16, 1)])])
    assert spans(groups) == [(0, 4, [1]), (4, 12, [1]), (12, 20, [1])]
    assert [group.restore for group in groups] == [6, None, None]
    assert [group.taken for group in groups] == [[(0, 0)], [(0, 1)], []]


def test_a_checkpoint_at_the_end_of_a_chunk_makes_no_empty_group() -> None:
    [group] = make_groups([tokens(1, 0, 8, checkpoints=[(8, 3)])])
    assert (group.first, group.last, group.is_fresh, group.taken) == (0, 8, True, [(0, 3)])


def test_only_the_first_piece_of_a_new_prompt_is_fresh() -> None:
    groups = make_groups([tokens(1, 0, 12, checkpoints=[(8, 3)])])
    assert [group.is_fresh for group in groups] == [True, False]


def test_a_row_of_one_token_that_starts_or_restores_does_not_decode_with_the_others() -> None:
    rows = [tokens(1, 5, 1), tokens(2, 0, 1), tokens(3, 8, 1, restore=0), tokens(4, 5, 1)]
    groups = make_groups(rows)
    assert spans(groups) == [(0, 1, [1]), (1, 2, [2]), (2, 3, [3]), (3, 4, [4])]
    assert [group.is_rows for group in groups] == [True, False, False, False]


def test_a_decoding_row_takes_its_checkpoint_from_the_group() -> None:
    [group] = make_groups([tokens(1, 5, 1), tokens(2, 7, 1, checkpoints=[(8, 4)])])
    assert group.taken == [(1, 4)]


def test_a_group_selects_its_part_of_what_has_a_row_per_token() -> None:
    rows = mx.arange(12).reshape(6, 1, 2)
    decoding, chunk = make_groups([tokens(1, 5, 1), tokens(2, 7, 1), tokens(3, 0, 4)])
    assert decoding.select(rows, 6).tolist() == rows[:2].tolist()
    assert chunk.select(rows, 6).tolist() == rows[2:].swapaxes(0, 1).tolist()
    offsets = mx.array([5, 7, 0, 1, 2, 3])
    assert decoding.select(offsets, 6).tolist() == [5, 7]
    assert chunk.select(offsets, 6).tolist() == [0]
    assert chunk.select(None, 6) is None
    assert chunk.select(mx.zeros((3, 2)), 6).shape == (3, 2)
    assert mx.concatenate([g.as_rows(g.select(rows, 6)) for g in (decoding, chunk)]).tolist() == rows.tolist()


def test_a_step_evaluates_the_states_of_its_sequences_and_no_checkpoint_of_an_earlier_step() -> None:
    step = StepContext()
    layer = RecurrentLayer([((2,), mx.float32)], step)

    def run(*rows: Row) -> list[Any]:
        """One step of a module that adds one to its state. Returns what is evaluated."""
        step.cut(rows)
        for index, group in enumerate(layer.groups):
            cache = layer.load(index)
            before = mx.zeros((len(group.sequence_ids), 2)) if cache[0] is None else cache[0]
            cache[0] = before + 1
            layer.store(index)
        layer.commit({1, 2})
        step.cut(())
        return [array[:, 0].tolist() for array in layer.arrays]

    assert run(tokens(1, 0, 8, checkpoints=[(4, 0), (6, 1)])) == [[3.0], [1.0], [2.0]]
    assert run(tokens(1, 8, 1)) == [[4.0]]
    assert run(tokens(1, 9, 1), tokens(2, 6, 2, restore=1)) == [[5.0], [3.0]]
    assert run(tokens(1, 10, 1), tokens(2, 8, 1, checkpoints=[(9, 0)])) == [[6.0, 4.0], [4.0]]


# -- states ----------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """Sequences with random tokens, each with blocks of its own, in a model runner without a scheduler."""

    runner: ModelRunner
    plain: Any
    sequences: dict[int, list[int]] = field(default_factory=dict)

    def add(self, number: int) -> None:
        tokens = np.random.default_rng(number).integers(1, 256, BLOCK_SIZE * BLOCKS_EACH)
        self.sequences[number] = tokens.tolist()

    def row(
        self,
        number: int,
        start: int,
        count: int,
        restore: int | None = None,
        checkpoints: Sequence[tuple[int, int]] = (),
        blocks: Sequence[int] = (),
    ) -> Row:
        """A row that samples. blocks: by default, those of the sequence."""
        own, end = range(number * BLOCKS_EACH, (number + 1) * BLOCKS_EACH), start + count
        tables = np.array([blocks or own], dtype=np.int32)
        ids, logits = self.sequences[number][start:end], range(end - 1, end)
        return Row(number, start, ids, logits, 1, restore, checkpoints, tables=tables)

    def logits(self, *rows: tuple[Any, ...]) -> list[list[float]]:
        """Of the last token of each row: sequence, start, num_tokens, and perhaps restore and checkpoints."""
        logits = self.runner.forward(Step([self.row(*row) for row in rows]), running=set(self.sequences))
        self.runner.finish_step(logits)
        values: Any = logits.tolist()
        return values  # type: ignore[no-any-return]

    def expected(self, number: int, length: int) -> list[float]:
        """mlx-lm's logits after the first `length` tokens of a sequence."""
        tokens = mx.array([self.sequences[number][:length]])
        return self.plain(tokens, cache=make_prompt_cache(self.plain))[0, -1].tolist()  # type: ignore[no-any-return]

    def check(self, *rows: tuple[Any, ...]) -> None:
        """Run a step whose logits are those of the sequences alone."""
        for (number, start, num, *_), logits in zip(rows, self.logits(*rows), strict=True):
            assert logits == pytest.approx(self.expected(number, start + num), abs=2e-3), f"sequence {number}"


ARCHITECTURES = ("qwen3_5", "nemotron_h", "lfm2")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ServedModel, Any]:
    path: Path = make_architecture(tmp_path_factory.mktemp("states") / "model", request.param)
    plain: Any = load_plain_model(path)[0]
    plain.eval()
    return load_model(str(path)), plain


@pytest.fixture
def scene(models: tuple[ServedModel, Any]) -> Scene:
    served, plain = models
    scene = Scene(ModelRunner(served, 6 * BLOCKS_EACH, BLOCK_SIZE, "gather"), plain)
    for number in range(6):
        scene.add(number)
    return scene


def test_prompts_and_decoding_rows_of_one_step_have_states_of_their_own(scene: Scene) -> None:
    scene.check((0, 0, 9), (1, 0, 1), (2, 0, 14))
    scene.check((0, 9, 1), (1, 1, 1), (3, 0, 5), (2, 14, 6))
    scene.check((0, 10, 1), (1, 2, 1), (2, 20, 1), (3, 5, 1))


def test_sequences_that_join_leave_skip_steps_and_change_places_keep_their_states(scene: Scene) -> None:
    scene.check(*((n, 0, 4) for n in range(4)))
    scene.check(*((n, 4, 1) for n in (0, 1, 2, 3)))
    scene.check((3, 5, 1), (1, 5, 1))
    scene.check((1, 6, 1), (3, 6, 1), (4, 0, 7))
    scene.check(*((n, at, 1) for n, at in ((0, 5), (4, 7), (2, 5))))
    del scene.sequences[3]
    scene.check(*((n, at, 1) for n, at in ((4, 8), (1, 7), (2, 6), (0, 6))))
    scene.check((4, 9, 3), (0, 7, 5))
    scene.check(*((n, at, 1) for n, at in ((0, 12), (1, 8), (2, 7), (4, 12))))


def test_a_later_row_starts_from_a_checkpoint_that_an_earlier_row_of_the_step_takes(scene: Scene) -> None:
    scene.sequences[1][:16] = scene.sequences[0][:16]
    rows = scene.row(0, 0, 20, None, ((8, 5), (16, 4))), scene.row(1, 16, 3, 4, blocks=[0, 1, 6, 7])
    first, second = scene.runner.forward(Step(rows), running={0, 1}).tolist()  # type: ignore[misc]
    assert first == pytest.approx(scene.expected(0, 20), abs=2e-3)
    assert second == pytest.approx(scene.expected(1, 19), abs=2e-3)


def test_a_row_starts_from_a_checkpoint_that_a_decoding_row_of_the_same_step_takes(scene: Scene) -> None:
    """The id had another state before. Of the decoding rows, the second one takes it."""
    scene.sequences[2][:16] = scene.sequences[1][:16]
    scene.check((0, 0, 8, None, ((8, 4),)), (1, 0, 15))
    rows = (
        scene.row(0, 8, 1),
        scene.row(1, 15, 1, None, ((16, 4),)),
        scene.row(2, 16, 3, 4, blocks=[4, 5, 10, 11]),
    )
    logits: Any = scene.runner.forward(Step(rows), running={0, 1, 2}).tolist()
    for row, number, length in zip(logits, (0, 1, 2), (9, 16, 19), strict=True):
        assert row == pytest.approx(scene.expected(number, length), abs=2e-3)


def test_a_checkpoint_is_not_changed_by_what_its_sequence_computes_after_it(scene: Scene) -> None:
    scene.check((0, 0, 12, None, ((8, 0),)), (1, 0, 7))
    scene.check((1, 7, 1, None, ((8, 1),)), (0, 12, 9))
    scene.check((0, 21, 1), (1, 8, 1))
    scene.check((0, 8, 3, 0), (1, 8, 2, 1))
    scene.check((0, 11, 1), (1, 10, 1))


def test_a_forward_pass_that_raises_changes_no_state(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.check(*((n, 0, 6) for n in range(3)))
    scene.check((0, 6, 1), (1, 6, 1))
    with monkeypatch.context() as patch:
        last = scene.runner.layers[-1]

        def failing(*_args: Any, **_kwargs: Any) -> Any:
            raise ValueError("injected")

        patch.setattr(last, "attend", failing)
        with pytest.raises(ValueError, match="injected"):
            scene.logits((0, 7, 1), (1, 7, 1), (2, 6, 5), (3, 0, 4))
    scene.check((1, 7, 1), (0, 7, 1), (2, 6, 5), (3, 0, 4))
    scene.check((0, 8, 1), (1, 8, 1), (2, 11, 1), (3, 4, 1))


def test_states_are_dropped_with_their_sequences(scene: Scene) -> None:
    """A number that comes back starts anew."""
    scene.check((0, 0, 6), (1, 0, 6))
    scene.check((0, 6, 1), (1, 6, 1))
    del scene.sequences[0]
    scene.check((1, 7, 1))
    scene.add(0)
    with pytest.raises((ValueError, KeyError)):
        scene.logits((0, 7, 1))
    scene.check((0, 0, 3), (1, 8, 2))


def test_rebuilt_pools_have_no_states(scene: Scene) -> None:
    scene.check((0, 0, 8, None, ((8, 0),)), (1, 0, 3))
    scene.runner.rebuild_pools()
    with pytest.raises((ValueError, KeyError)):
        scene.logits((1, 3, 1))
    with pytest.raises((ValueError, KeyError)):
        scene.logits((0, 8, 1, 0))
    scene.check((0, 0, 9), (1, 0, 4))
