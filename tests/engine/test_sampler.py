"""The sampler against plain references, and what a row may and may not depend on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxpaged.core.engine.random_sampling import filter_width, filtered, gumbel_noise, noise_keys, row_parameters
from mlxpaged.core.engine.sampler import SampledToken, Sampler, SamplingRow
from mlxpaged.core.engine.sampling_params import SamplingParams
from tests.lazy_kernels import no_fusion

Array = npt.NDArray[np.float64]

VOCAB = 37


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(scale=2, size=(rows, vocab)).astype(np.float32))


def row(
    sequence_id: int = 0, prompt: tuple[int, ...] = (1,), answer: tuple[int, ...] = (), **params: Any
) -> SamplingRow:
    options = SamplingParams(**params)
    seed = options.seed if options.seed is not None else 0
    return SamplingRow(sequence_id, options, seed, [*prompt, *answer], len(prompt), len(prompt) + len(answer))


def sample(logits: mx.array, rows: list[SamplingRow]) -> list[int]:
    return [token.token_id for token in Sampler(logits.shape[-1]).sample(logits, rows).read()]


def filtered_by(logits: mx.array, params: list[SamplingParams]) -> Array:
    rows = [SamplingRow(i, each, 0, [1], 1, 1) for i, each in enumerate(params)]
    size = logits.shape[-1]
    return np.array(filtered(logits, mx.array(row_parameters(rows, size)), filter_width(params, size)))


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


# -- tokens that do not exist ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [[36], [34, 35, 36], [3, 20, 36], [0]])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}, {"temperature": 0.0, "presence_penalty": 1.0}])
def test_a_token_that_does_not_exist_is_as_if_it_had_no_logit(absent: list[int], params: dict[str, Any]) -> None:
    logits = np.array(logits_of(3))
    large, never = logits.copy(), logits.copy()
    large[:, absent], never[:, absent] = 50.0, -np.inf
    rows = [row(i, logprobs=4, **params) for i in range(3)]
    found, expected = (Sampler(VOCAB, absent=absent).sample(mx.array(each), rows).read() for each in (large, never))
    for one, other in zip(found, expected, strict=True):
        assert one == other
        assert one.logprobs is not None
        assert not {one.token_id, *(token for token, _ in one.logprobs.top)} & {*absent}
    assert (
        Sampler(VOCAB, absent=absent).guess(mx.array(large), rows).tolist()
        == Sampler(VOCAB, absent=absent).guess(mx.array(never), rows).tolist()
    )


def test_a_head_without_such_rows_has_no_further_operation() -> None:
    sampler, logits = Sampler(VOCAB), logits_of(2)
    assert sampler.of_tokens(logits) is logits
    assert sampler.absent is None


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"seed": 1}])
def test_an_end_token_is_replaced_in_the_rows_that_say_so(params: dict[str, Any]) -> None:
    """After a draft too: the row after it has the draft behind it."""
    logits = np.full((4, VOCAB), -20.0, np.float32)
    logits[[0, 1, 2, 3], [5, 5, 6, 7]] = 20.0
    close = 9, frozenset({5, 6})
    rows = [row(i, **params)._replace(close=each) for i, each in enumerate((close, None, close, close))]
    rows[2] = rows[2]._replace(drafts=(5,), position=rows[2].position + 1)
    assert sample(mx.array(logits), rows) == [9, 5, 9, 7]


# -- filters -----------------------------------------------------------------------------------------------------------


def kept_by_reference(logits: Array, top_k: int, top_p: float, min_p: float) -> set[int]:
    """min-p, then top-k, then top-p over what is left, the most likely token always kept."""
    probability = softmax(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in ranked if probability[token] >= min_p * probability[ranked[0]]]
    kept = kept[: top_k or None] or ranked[:1]
    share = probability[kept] / probability[kept].sum()
    before = np.cumsum(share) - share
    nucleus = [token for token, mass in zip(kept, before, strict=True) if mass < top_p or top_p >= 1]
    return set(nucleus or ranked[:1])


def kept_by_sampler(logits: Array, params: SamplingParams) -> set[int]:
    given_logits = mx.array(logits.astype(np.float32)[None])
    out = filtered_by(given_logits, [params])[0]
    kept = {int(token) for token in np.flatnonzero(out > -np.inf)}
    assert all(out[token] == np.float32(logits[token]) for token in kept)
    return kept


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0, 1, 2, 5, VOCAB, 10**6]),
    st.sampled_from([1.0, 0.95, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.05, 0.5, 0.999, 1.0]),
)
def test_top_k_top_p_and_min_p_keep_what_the_reference_keeps(seed: int, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=2, size=VOCAB).astype(np.float32).astype(np.float64)
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept_by_sampler(logits, params) == kept_by_reference(logits, top_k, top_p, min_p)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.01, 0.5, 0.9, 0.999, 0.999999]),
    st.sampled_from([0.0, 1e-4, 0.1]),
    st.sampled_from([0, 50, 1500]),
    st.sampled_from([0.01, 1.0, 3.0, 8.0]),
)
def test_of_a_large_vocabulary_top_p_keeps_the_fewest_tokens_that_fill_it(
    seed: int, top_p: float, min_p: float, top_k: int, scale: float
) -> None:
    """Flat or steep: what is set aside before the others are sorted is never among them."""
    logits = np.random.default_rng(seed).normal(scale=scale, size=2000).astype(np.float32).astype(np.float64)
    kept = kept_by_sampler(logits, SamplingParams(top_p=top_p, min_p=min_p, top_k=top_k))
    candidates = sorted(kept_by_reference(logits, top_k, 1.0, min_p), key=lambda token: -logits[token])
    assert kept == set(candidates[: len(kept)])
    share = softmax(logits[candidates])
    assert share[: len(kept)].sum() >= top_p - 1e-5
    assert share[: len(kept) - 1].sum() <= top_p + 1e-5


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.5}, 4),
        ({"top_p": 0.51}, 5),
        ({"min_p": 1.0}, 8),
        ({"top_k": 4, "top_p": 0.5}, 2),
        ({"top_p": 1e-9}, 1),
    ],
    ids=str,
)
def test_of_eight_equal_logits_as_many_stay_as_asked(params: dict[str, Any], kept: int) -> None:
    assert len(kept_by_sampler(np.zeros(8), SamplingParams(**params))) == kept


def test_rows_are_filtered_each_by_its_own_settings() -> None:
    logits = logits_of(4)
    params = [SamplingParams(top_k=1), SamplingParams(top_p=0.3), SamplingParams(min_p=0.5), SamplingParams()]
    together = filtered_by(logits, params)
    for i, one in enumerate(params):
        np.testing.assert_array_equal(together[i], filtered_by(logits[i : i + 1], [one])[0])
    assert np.isfinite(together[3]).all()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_a_filter_down_to_one_token_draws_the_most_likely(params: dict[str, Any]) -> None:
    logits = logits_of(20)
    rows = [row(i, temperature=2.0, seed=i, **params) for i in range(20)]
    assert sample(logits, rows) == np.array(logits).argmax(axis=1).tolist()


# -- penalties and bias ------------------------------------------------------------------------------------------------


def penalized_by_reference(logits: Array, prompt: list[int], answer: list[int], params: SamplingParams) -> Array:
    scores = logits.copy()
    for token in set((prompt + answer)[-(params.repetition_context_size or 10**6) :]):
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token, count in Counter(answer).items():
        scores[token] -= params.frequency_penalty * count + params.presence_penalty
    return scores


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    {"repetition_penalty": 1.5, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4, "repetition_context_size": 2},
    {"repetition_penalty": 1.5, "repetition_context_size": 4, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.5, "repetition_context_size": 1000},
    {},
]


def test_penalties_follow_the_reference_while_requests_join_and_leave() -> None:
    """Greedy, so that the choice shows the scores; each request runs seven steps, one later than the one before. After
    its first step, its latest token is not known: that is still on the device."""
    sampler = Sampler(VOCAB)
    rng = np.random.default_rng(5)
    ids = range(2 * len(PENALTIES))
    prompts = {i: rng.integers(0, VOCAB, size=rng.integers(1, 30)).tolist() for i in ids}
    params = {i: SamplingParams(temperature=0.0, **PENALTIES[i % len(PENALTIES)]) for i in ids}
    answers: dict[int, list[int]] = {i: [] for i in ids}
    changed = 0
    for step in range(len(ids) + 6):
        running = [i for i in ids if i <= step < i + 7]
        rng.shuffle(running)
        # Few tokens stand out, so that penalties on them decide.
        logits = rng.normal(scale=0.3, size=(len(running), VOCAB)).astype(np.float32)
        logits[:, :5] += 2
        rows = [
            SamplingRow(
                *(i, params[i], 0, prompts[i] + answers[i][:-1], len(prompts[i]), len(prompts[i]) + len(answers[i]))
            )
            for i in running
        ]
        got = [token.token_id for token in sampler.sample(mx.array(logits), rows).read()]
        for i, token, scores in zip(running, got, logits.astype(np.float64), strict=True):
            assert token == penalized_by_reference(scores, prompts[i], answers[i], params[i]).argmax()
            changed += int(token != scores.argmax())
            answers[i].append(token)
            if step == i + 6:
                sampler.forget(i)
    assert changed > 10


def test_counts_start_from_prompt_and_answer_of_a_request_that_comes_back() -> None:
    logits = mx.array([[3.0, 2.9, 0.0]])
    sampler = Sampler(3)
    first = row(1, prompt=(2,), answer=(0, 0), temperature=0.0, frequency_penalty=0.1)
    for _ in range(2):
        assert sampler.sample(logits, [first]).read()[0].token_id == 1
        sampler.forget(1)


def test_presence_and_frequency_leave_prompt_tokens_alone() -> None:
    logits = mx.array([[3.0, 2.9, 0.0]])
    options: dict[str, Any] = {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 2.0}
    assert sample(logits, [row(prompt=(0, 0), **options)]) == [0]
    assert sample(logits, [row(prompt=(2,), answer=(0,), **options)]) == [1]


def test_repetition_penalty_counts_prompt_tokens() -> None:
    logits = mx.array([[3.0, 2.9, -1.0]])
    assert sample(logits, [row(prompt=(0,), temperature=0.0, repetition_penalty=1.5)]) == [1]


def test_forgetting_an_unknown_request_is_no_error() -> None:
    sampler = Sampler(VOCAB)
    sampler.forget(12345)
    logits = logits_of(1)
    [token] = sampler.sample(logits, [row(temperature=0.0, frequency_penalty=1.0)]).read()
    assert token.token_id == int(np.array(logits)[0].argmax())


def test_logit_bias_forces_and_bans_tokens_of_its_own_row_only() -> None:
    logits = logits_of(3)
    best = np.array(logits).argmax(axis=1).tolist()
    rows = [
        row(0, temperature=0.0, logit_bias={7: 100.0}),
        row(1, temperature=0.0),
        row(2, temperature=0.0, logit_bias={best[2]: -100.0}),
    ]
    tokens = sample(logits, rows)
    assert tokens[:2] == [7, best[1]]
    assert tokens[2] == np.array(logits)[2].argsort()[-2]


class CountedBias(dict[int, float]):
    """Counts how often its items are read."""

    reads = 0

    def keys(self) -> Any:
        self.reads += 1
        return super().keys()

    def items(self) -> Any:
        self.reads += 1
        return super().items()

    def values(self) -> Any:
        self.reads += 1
        return super().values()


def test_a_bias_is_read_once_for_all_steps() -> None:
    bias = CountedBias({token: float(token) for token in range(VOCAB)})
    params, sampler = SamplingParams(temperature=0.0, logit_bias=bias), Sampler(VOCAB)
    found = [
        sampler.sample(mx.zeros((2, VOCAB)), [row()._replace(sequence_id=i, params=params) for i in range(2)]).read()
        for _ in range(5)
    ]
    assert found == [[SampledToken(VOCAB - 1)] * 2] * 5
    assert bias.reads == 2  # its tokens, and what is added to them


# -- draws -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str
)
def test_draws_follow_the_distribution(params: dict[str, Any]) -> None:
    """4,096 draws of 9 tokens: with the right distribution, chi-square of 8 degrees of freedom stays below 31 in
    9,999 of 10,000 cases; the seeds are fixed."""
    draws, vocab = 4096, 9
    logits = np.linspace(-1.5, 1.5, vocab)[np.random.default_rng(1).permutation(vocab)]
    options = SamplingParams(**params)
    kept = kept_by_reference(logits / options.temperature, options.top_k, options.top_p, options.min_p)
    scaled = np.where([token in kept for token in range(vocab)], logits / options.temperature, -np.inf)
    expected = softmax(scaled) * draws
    repeated = mx.array(np.tile(logits.astype(np.float32), (draws // 2, 1)))
    tokens = []
    for prompt in ((1,), (1, 2)):  # two positions of each seed
        rows = [row(i, prompt=prompt, **params | {"seed": i}) for i in range(draws // 2)]
        tokens += sample(repeated, rows)
    counts = np.bincount(tokens, minlength=vocab)
    assert (counts[expected == 0] == 0).all()
    likely = expected > 0
    assert float(((counts - expected)[likely] ** 2 / expected[likely]).sum()) < 31


@pytest.mark.parametrize("vocab", [1, 2, 37, 768, 1001])
def test_a_seed_and_a_position_give_the_same_token_whatever_the_batch(vocab: int) -> None:
    logits = logits_of(6, vocab)
    settings_of: list[dict[str, Any]] = [
        {},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 0.0},
        {"repetition_penalty": 1.2},
        {"logprobs": 2},
    ]
    rows = [row(i, prompt=(0,) * (i + 1), **{"seed": 100 + i} | options) for i, options in enumerate(settings_of)]
    together = sample(logits, rows)
    assert sample(logits[::-1], rows[::-1])[::-1] == together
    for i in range(6):
        assert sample(logits[i : i + 1], [rows[i]]) == [together[i]]


def test_other_seeds_and_positions_give_other_noise() -> None:
    seeds = [0, 1, 2, -1, 2**63, 2**64 - 2, 7, 7, 8]
    positions = [0, 0, 0, 0, 0, 0, 1, 2, 1]
    noise = np.array(gumbel_noise(mx.array(noise_keys(seeds, positions)), 1001))
    assert np.isfinite(noise).all()
    correlation = np.corrcoef(noise) - np.eye(len(seeds))
    assert np.abs(correlation).max() < 0.15


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**64 - 1, 2**63, 2**70])
def test_seeds_of_any_size_are_repeatable(seed: int) -> None:
    logits = mx.zeros((1, 1000))
    assert sample(logits, [row(seed=seed)]) == sample(logits, [row(seed=seed)])


def test_noise_has_the_moments_of_gumbel() -> None:
    noise = np.array(gumbel_noise(mx.array(noise_keys(list(range(40)), [3] * 40)), 1000), dtype=np.float64)
    assert abs(noise.mean() - 0.5772) < 0.03
    assert abs(noise.var() - np.pi**2 / 6) < 0.06


def test_greedy_rows_are_the_same_beside_any_neighbour() -> None:
    logits = logits_of(8)
    best = np.array(logits).argmax(axis=1).tolist()
    neighbours: list[dict[str, Any]] = [
        {},
        {"temperature": 1.7, "top_k": 2},
        {"frequency_penalty": 2.0},
        {"logit_bias": {3: 50.0}},
    ]
    rows = [row(i, **({"temperature": 0.0} if i % 2 else neighbours[i // 2])) for i in range(8)]
    assert sample(logits, rows)[1::2] == best[1::2]


def test_a_bias_on_a_token_without_a_logit_changes_no_other_row() -> None:
    """A draft model may have fewer logits than the model. MLX writes beyond a row, into the next one."""
    logits, bias = logits_of(2), {VOCAB + 4: 100.0}
    rows = [row(0, logit_bias=bias, temperature=0.0), row(1, temperature=0.0)]
    assert Sampler(VOCAB + 10).guess(logits, rows).tolist() == mx.argmax(logits, axis=-1).tolist()


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}, {"logprobs": 2}, {"presence_penalty": 1.0}])
def test_forbidden_tokens_are_not_drawn_and_the_neighbours_do_not_notice(params: dict[str, Any]) -> None:
    logits = logits_of(3)
    plain = sample(logits, [row(i, **params) for i in range(3)])
    rows = [row(i, **params)._replace(forbidden=[plain[1], VOCAB + 5] if i == 1 else ()) for i in range(3)]
    drawn = sample(logits, rows)
    assert (drawn[0], drawn[2]) == (plain[0], plain[2])
    assert drawn[1] != plain[1]


def test_a_hot_row_still_draws_the_only_possible_token() -> None:
    logits = mx.full((3, VOCAB), -mx.inf)
    logits[:, 11] = 0.0
    for params in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}, {"repetition_penalty": 1.3}):
        rows = [row(i, **{"seed": i, "temperature": 2.0} | params) for i in range(3)]
        assert sample(logits, rows) == [11, 11, 11]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-38, 1e-60])
@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_a_temperature_close_to_zero_is_greedy(temperature: float, params: dict[str, Any]) -> None:
    logits = mx.array([[-3.0, 8.0, 20.0, 19.0, 5.0, 19.5], [-9.0, -8.0, -7.0, -6.0, -50.0, -6.5]])
    rows = [row(i, temperature=temperature, seed=i, **params) for i in range(2)]
    assert sample(logits, rows) == [2, 3]


@pytest.mark.parametrize("value", [-float("inf"), 1e9, -1e9, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["one", "all"])
def test_extreme_logits_still_give_a_token_and_leave_the_neighbours_alone(value: float, where: str) -> None:
    logits = logits_of(12)
    spoilt = mx.array(logits)
    if where == "one":
        spoilt[:6, 5] = value
    else:
        spoilt[:6] = value
    settings_of: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"logprobs": 3},
        {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
    ]
    rows = [row(i, **{"seed": i} | settings_of[i % 6]) for i in range(12)]
    tokens = sample(spoilt, rows)
    assert all(0 <= token < VOCAB for token in tokens)
    assert tokens[6:] == sample(logits, rows)[6:]


# -- log-probabilities -------------------------------------------------------------------------------------------------


def with_logprobs(logits: mx.array, rows: list[SamplingRow]) -> list[SampledToken]:
    return Sampler(logits.shape[-1]).sample(logits, rows).read()


def test_logprobs_are_the_log_softmax_of_the_raw_logits() -> None:
    logits = logits_of(4)
    rows = [
        row(0, temperature=0.0, logprobs=5),
        row(1, temperature=0.3, seed=4, logprobs=0, top_k=2),
        row(2, temperature=0.0, logit_bias={9: 100.0}, repetition_penalty=1.5, logprobs=20),
        row(3, temperature=0.0),
    ]
    sampled = with_logprobs(logits, rows)
    assert sampled[3].logprobs is None
    for i, (token, count) in enumerate(zip(sampled, (5, 0, 20), strict=False)):
        expected = np.log(softmax(np.array(logits[i], dtype=np.float64)))
        found = token.logprobs
        assert found is not None
        assert found.token_id == token.token_id
        assert found.logprob == pytest.approx(expected[token.token_id], abs=1e-5)
        assert [top for top, _ in found.top] == (-expected).argsort()[:count].tolist()
        assert [logprob for _, logprob in found.top] == pytest.approx(sorted(expected, reverse=True)[:count], abs=1e-5)
    assert sampled[2].token_id == 9


def test_logprobs_of_given_tokens_are_reported_in_their_order_however_unlikely_they_are() -> None:
    logits = logits_of(3)
    worst, best = int(mx.argmin(logits[1])), int(mx.argmax(logits[1]))
    rows = [
        row(0, temperature=0.0, logprobs=3),
        row(1, temperature=0.0, logprobs=0, logprob_token_ids=(best, worst)),
        row(2, temperature=0.0, logprobs=0, logprob_token_ids=(7,)),
    ]
    plain, asked, other = (token.logprobs for token in with_logprobs(logits, rows))
    assert plain is not None
    assert asked is not None
    assert other is not None
    expected = np.log(softmax(np.array(logits[1], dtype=np.float64)))
    assert asked.top == (
        (best, pytest.approx(expected[best], abs=1e-5)),
        (worst, pytest.approx(expected[worst], abs=1e-5)),
    )
    assert [token for token, _ in other.top] == [7]
    (alone,) = with_logprobs(logits[:1], rows[:1])
    assert alone.logprobs == plain


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    (token,) = with_logprobs(logits_of(1, 3), [row(temperature=0.0, logprobs=20)])
    assert token.logprobs is not None
    assert len(token.logprobs.top) == 3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_type_logits_give_logprobs_of_float32(dtype: mx.Dtype) -> None:
    logits = logits_of(1).astype(dtype)
    (token,) = with_logprobs(logits, [row(temperature=0.0, logprobs=1)])
    expected = np.log(softmax(np.array(logits[0].astype(mx.float32), dtype=np.float64)))
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected.max(), abs=1e-5)


# -- grammars ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.5}, {"temperature": 1.0, "top_k": 1}])
def test_a_mask_restricts_its_row_and_no_other(params: dict[str, Any]) -> None:
    logits = logits_of(3)
    plain = sample(logits, [row(i, **params) for i in range(3)])
    allowed = {3, 31, 32, VOCAB - 1} - {plain[1]}
    mask = np.zeros(2, np.int32)
    for token in allowed:
        mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    rows = [row(i, **params)._replace(mask=mask if i == 1 else None) for i in range(3)]
    drawn = sample(logits, rows)
    assert (drawn[0], drawn[2]) == (plain[0], plain[2])
    assert drawn[1] in allowed


# -- compiled ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        [{"temperature": 1.0}] * 3,
        [{"temperature": 0.8, "top_p": 0.7}, {"temperature": 1.5, "top_p": 0.5, "top_k": 9}, {"min_p": 0.2}],
        [{"temperature": 1.0, "top_k": 3}, {"temperature": 1.0, "top_k": 5, "top_p": 0.9}],
        [{"temperature": 1.0, "min_p": 0.3}] * 2,
        [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.5}],
        [{"temperature": 0.9, "frequency_penalty": 1.0, "logit_bias": {3: 5.0}, "top_p": 0.9}] * 2,
    ],
)
def test_a_compiled_sampler_samples_the_same_tokens_step_for_step(params: list[dict[str, Any]]) -> None:
    outcomes = []
    with no_fusion():
        for compiled in (False, True):
            sampler, answers = Sampler(VOCAB, compiled), [[1] for _ in params]
            for step in range(12):
                rows = [
                    row(i, answer=tuple(answer), seed=i, **each)
                    for i, (answer, each) in enumerate(zip(answers, params, strict=True))
                ]
                for answer, token in zip(
                    answers, sampler.sample(logits_of(len(rows), seed=step), rows).read(), strict=True
                ):
                    answer.append(token.token_id)
            outcomes.append(answers)
    assert outcomes[0] == outcomes[1]
    assert len({tuple(answer) for answer in outcomes[0]}) == len(params)
