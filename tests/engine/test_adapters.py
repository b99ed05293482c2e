"""Adapters and their model in the same batches: each request gets the tokens that mlx-lm generates with its adapter."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model as load_plain_model

from mlxpaged.core.engine.core import EngineCore
from mlxpaged.core.engine.request import Request
from mlxpaged.core.step import Row, Step
from mlxpaged.cpu.split_linear import SplitFeedForward, SplitLinear
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.adapters import adapted_layers
from mlxpaged.models.adapters.adapter_path import AdapterPath
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.layers import bytes_per_token, is_per_sequence
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model, own_embedding_model
from mlxpaged.parts.embeddings.embedder import Embedder
from mlxpaged.parts.embeddings.embedding_line import EmbeddingRequest
from tests.answers import Answer, greedy_answer
from tests.engine.hybrid import Run, request, run
from tests.engine.test_drafting import use_oracle
from tests.models.architectures import ARCHITECTURES, REFUSED, is_installed, make_architecture
from tests.support import make_adapter, make_embedding_model, poison_new_blocks, quantize, write_modules

NUM_TOKENS = 8
NOT_ADAPTED = {"dbrx", "gemma3n", "prism_hadamard_qwen35"}
"""Architectures whose adapters of all linear layers are refused. mlx-lm itself cannot run the last two with them."""

RED, BLUE = "red", "blue"
EACH = (None, RED, BLUE)


class Adapted:
    """A tiny model with two adapters, and the same model as mlx-lm loads it with each. options: of the blue adapter."""

    def __init__(self, path: Path, **blue: Any) -> None:
        self.path = path
        self.adapters = [
            AdapterPath(RED, make_adapter(path, path / RED, 1)),
            AdapterPath(BLUE, make_adapter(path, path / BLUE, 2, **{"rank": 2} | blue)),
        ]
        self.served = load_model(str(path), LoadOptions(adapters=self.adapters))
        self._plain: dict[str | None, Any] = {}

    def plain(self, adapter: str | None) -> Any:
        if adapter not in self._plain:
            model, _ = load_plain_model(self.path)
            if adapter is not None:
                load_adapters(model, str(self.path / adapter))
            model.eval()
            self._plain[adapter] = model
        return self._plain[adapter]

    def answer(self, prompt: list[int], adapter: str | None, num_tokens: int = NUM_TOKENS) -> Answer:
        model = self.plain(adapter)
        return greedy_answer(model, make_prompt_cache(model), prompt, num_tokens)

    def engine(self, num_blocks: int = 200, served: ServedModel | None = None, **options: Any) -> EngineCore:
        defaults: dict[str, Any] = {
            "block_size": 8,
            "attention_backend": "gather",
            "max_num_seqs": 16,
            "max_step_ms": 0,
        }
        served = served or self.served
        config = EngineConfig(
            str(self.path),
            kv_cache_bytes=num_blocks * 8 * bytes_per_token(served.layers),
            swap_space_bytes=options.pop("swap_blocks", 0) * 8 * bytes_per_token(served.layers),
            **defaults | options,
        )
        core = build_engine(config, served)
        poison_new_blocks(core)
        return core


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(16, 250) for _ in range(length)]


def requests_of(
    prompts: Sequence[list[int]], adapters: Sequence[str | None] = EACH, num_tokens: int = NUM_TOKENS
) -> list[Request]:
    """One request for each prompt and adapter."""
    return [
        request(f"{i} {adapter}", prompt, num_tokens, adapter=adapter)
        for i, prompt in enumerate(prompts)
        for adapter in adapters
    ]


def assert_answers(adapted: Adapted, result: Run, requests: Sequence[Request]) -> None:
    for each in requests:
        assert each.params.max_tokens is not None
        answer = adapted.answer(each.prompt_token_ids, each.adapter, each.params.max_tokens)
        assert answer.equals(result.tokens(each.request_id)), each.request_id


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The blue adapter is one of DoRA."""
    return Adapted(make_architecture(tmp_path_factory.mktemp("dense") / "qwen3", "qwen3"), dora=True)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The blue adapter changes only one of three layers of experts, and not the first."""
    keys = ["self_attn.v_proj", "mlp.switch_mlp.gate_proj"]
    path = make_architecture(tmp_path_factory.mktemp("experts") / "qwen3_moe", "qwen3_moe")
    return Adapted(path, keys=keys, num_layers=2)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """Gated delta nets, which are called in groups of a step."""
    return Adapted(make_architecture(tmp_path_factory.mktemp("hybrid") / "qwen3_5", "qwen3_5"))


@pytest.fixture(params=["dense", "experts", "hybrid"])
def adapted(request: pytest.FixtureRequest) -> Adapted:
    found: Adapted = request.getfixturevalue(request.param)
    return found


def test_adapters_and_their_model_answer_in_the_same_batches(adapted: Adapted) -> None:
    """Prompts are cut in chunks, and modules of experts sort their rows. The second time, prefixes are cached."""
    core = adapted.engine(max_num_batched_tokens=48)
    requests = requests_of([text(3, 1), text(20, 2), text(45, 3)])
    result = run(core, requests)
    assert_answers(adapted, result, requests)
    mixed = [batch for batch in result.batches if len({row.adapter for row in batch.rows}) == 3]
    assert any(row.num_tokens > 1 for batch in mixed for row in batch.rows)
    assert any(all(row.num_tokens == 1 for row in batch.rows) for batch in mixed)
    answers = {tuple(result.tokens(f"1 {adapter}")) for adapter in EACH}
    assert len(answers) == 3, "the adapters change the answer"
    again = run(core, requests)
    assert_answers(adapted, again, requests)
    assert again.num_computed() < result.num_computed()


def test_drafts_are_verified_by_the_adapter_of_their_request(adapted: Adapted) -> None:
    """States are taken back with it too."""
    core = adapted.engine(max_num_batched_tokens=48, speculative="ngram")
    requests = requests_of([text(3, 1), text(20, 2), text(45, 3)], num_tokens=16)
    answers = {each.request_id: adapted.answer(each.prompt_token_ids, each.adapter, 16).tokens for each in requests}
    drafting = use_oracle(core, answers)
    assert_answers(adapted, run(core, requests), requests)
    assert drafting.stats().drafted_total > drafting.stats().accepted_total > 20
    assert (core.runner.rollback.module_calls > 0) == core.runner.is_recurrent


def test_a_batch_invariant_engine_gives_each_adapter_the_same_bits_in_any_batch(dense: Adapted) -> None:
    core = dense.engine(batch_invariant=True, prefix_caching=False)
    requests = requests_of([text(3, 1), text(20, 2)])
    requests = [replace(each, params=replace(each.params, logprobs=2)) for each in requests]

    def bits(result: Run, name: str) -> list[object]:
        return [(output.token_ids, output.logprobs) for output in result.outputs[name]]

    together = run(core, requests)
    for each in requests:
        name = each.request_id
        assert bits(run(core, [each]), name) == bits(together, name), name


def test_a_batch_of_one_adapter_has_the_tokens_of_generate_step(adapted: Adapted) -> None:
    core, prompt = adapted.engine(), text(20, 2)
    for adapter in (RED, BLUE):
        steps = generate_step(mx.array(prompt), adapted.plain(adapter), max_tokens=NUM_TOKENS)
        expected = [int(token) for token, _ in steps]
        assert run(core, [request("one", prompt, NUM_TOKENS, adapter=adapter)]).tokens("one") == expected


def test_a_prefix_is_shared_within_an_adapter_and_not_across(dense: Adapted, hybrid: Adapted) -> None:
    for adapted in (dense, hybrid):
        core, prompt = adapted.engine(), text(40, 5)
        for expected in (0, 32 if adapted is hybrid else 39):
            for adapter in EACH:
                result = run(core, [request("one", prompt, NUM_TOKENS, adapter=adapter)])
                assert result.outputs["one"][-1].num_cached_tokens == expected, adapter
                assert adapted.answer(prompt, adapter).equals(result.tokens("one"))


def test_prompts_that_arrive_together_share_nothing_across_adapters(dense: Adapted) -> None:
    core = dense.engine(max_num_batched_tokens=64)
    prompts = [[*text(40, 5), 40 + i] for i in range(3)]
    requests = requests_of(prompts)
    result = run(core, requests)
    assert_answers(dense, result, requests)
    once = 3 * 40  # the prefix is computed once for each adapter
    assert result.num_computed() <= once + 9 * NUM_TOKENS


@pytest.mark.parametrize("swap_blocks", [0, 60])
@pytest.mark.rotated("models")
def test_preempted_sequences_go_on_with_their_adapters(adapted: Adapted, swap_blocks: int) -> None:
    core = adapted.engine(num_blocks=5, swap_blocks=swap_blocks, max_num_batched_tokens=32)
    requests = requests_of([text(7, 6)], num_tokens=12)
    result = run(core, requests)
    assert core.stats().scheduler.preemptions_total > 0
    assert_answers(adapted, result, requests)


def test_a_fork_has_the_adapter_of_its_parent(adapted: Adapted) -> None:
    core = adapted.engine()
    requests = [request(f"{adapter}", text(20, 8), NUM_TOKENS, adapter=adapter) for adapter in EACH]
    forks = [replace(each, request_id=f"{each.request_id} 2", fork_of=each.request_id) for each in requests]
    assert_answers(adapted, run(core, [*requests, *forks]), [*requests, *forks])


def test_a_failing_step_is_repeated_with_the_adapters_of_its_rows(
    adapted: Adapted, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, failed = adapted.engine(), [0]
    build = core.sampler.sample

    def fail_once(*args: Any) -> Any:
        failed[0] += 1
        if failed[0] == 4:
            raise RuntimeError("injected")
        return build(*args)

    monkeypatch.setattr(core.sampler, "sample", fail_once)
    requests = requests_of([text(20, 9)])
    assert_answers(adapted, run(core, requests), requests)


def first_logprobs(core: EngineCore, adapters: Sequence[str | None]) -> list[Any]:
    """Of the first token of the same prompts, whose adapters may differ."""
    requests = []
    for i, adapter in enumerate(adapters):
        each = request(str(i), text(12, i), 1, adapter=adapter)
        requests.append(replace(each, params=replace(each.params, logprobs=5)))
    result = run(core, requests)
    return [result.outputs[str(i)][0].logprobs for i in range(len(adapters))]


def test_answers_without_an_adapter_are_equal_to_the_last_bit(adapted: Adapted) -> None:
    """If adapters are loaded, and if the same step computes others."""
    alone = adapted.engine(served=load_model(str(adapted.path)))
    expected = first_logprobs(alone, [None] * 4)
    assert first_logprobs(adapted.engine(), [None] * 4) == expected
    mixed = first_logprobs(adapted.engine(), [None, RED, BLUE, None])
    assert (mixed[0], mixed[3]) == (expected[0], expected[3])
    assert mixed[1] != expected[1]


def operations(served: ServedModel, adapters: Sequence[str | None]) -> int:
    """Of the graph of one decode step, on MLX's side."""
    core = build_engine(EngineConfig(kv_cache_bytes=2**20, attention_backend="gather"), served)
    rows = [
        Row(i, 0, [20 + i], range(1), num_sampled=1, adapter=adapter, tables=np.array([[i]], np.int32))
        for i, adapter in enumerate(adapters)
    ]
    graph = StringIO()
    mx.export_to_dot(graph, core.runner.forward(Step(rows), running={0, 1, 2}))
    return graph.getvalue().count("shape=rectangle")


def test_a_step_without_adapters_has_no_more_operations_than_without_any_loaded(adapted: Adapted) -> None:
    expected = operations(load_model(str(adapted.path)), [None] * 3)
    assert expected > 50
    assert operations(adapted.served, [None] * 3) == expected
    assert operations(adapted.served, [RED] * 3) > expected, "they are counted"


def test_adapters_of_the_embeddings_and_the_output_head_are_right(tmp_path: Path) -> None:
    """The head gets only the rows whose logits are wanted: also those of the prompt, in another order."""
    for tied in (False, True):
        path = make_architecture(tmp_path / f"tied-{tied}", "qwen3", tie_word_embeddings=tied)
        keys = ["model.embed_tokens", "self_attn.q_proj", *([] if tied else ["lm_head"])]
        adapted = Adapted(path, keys=keys)
        core = adapted.engine(max_num_batched_tokens=48)
        requests = requests_of([text(20, 2), text(45, 3)], [BLUE, None])
        asking = [replace(each, params=replace(each.params, prompt_logprobs=0)) for each in requests]
        result = run(core, asking)
        assert_answers(adapted, result, requests)
        for each in requests:
            prompt = each.prompt_token_ids
            logits = adapted.plain(each.adapter)(mx.array([prompt]))[0].astype(mx.float32)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            expected = [logprobs[i, token].item() for i, token in enumerate(prompt[1:])]
            found = result.outputs[each.request_id][0].prompt_logprobs
            assert found is not None
            np.testing.assert_allclose(found.logprobs, expected, atol=2e-3)


def test_adapters_of_quantized_layers_are_right(tmp_path: Path) -> None:
    """DoRA's norms are those of the dequantized weights. Experts are quantized too."""
    adapted = Adapted(quantize(make_architecture(tmp_path / "q", "qwen3"), 4), dora=True)
    requests = requests_of([text(20, 2)])
    assert_answers(adapted, run(adapted.engine(), requests), requests)
    adapted = Adapted(quantize(make_architecture(tmp_path / "experts", "qwen3_moe"), 4))
    assert_answers(adapted, run(adapted.engine(), requests), requests)


def test_layers_that_run_once_per_sequence_have_adapters(tmp_path: Path) -> None:
    adapted = Adapted(make_architecture(tmp_path / "m", "baichuan_m1"))
    assert is_per_sequence(adapted.served.layers)
    requests = requests_of([text(9, 1), text(20, 2)])
    assert_answers(adapted, run(adapted.engine(), requests), requests)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="CPU streams are for a CPU")
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_adapters_of_layers_that_are_split_among_cpu_streams_are_right(
    many_streams: None, tmp_path: Path, kind: str
) -> None:
    path = make_architecture(tmp_path / "m", kind, hidden_size=64, intermediate_size=128)
    adapted = Adapted(path, **({"dora": True} if kind == "qwen3" else {}))
    modules: list[Module] = adapted.served.model.modules()
    assert any(isinstance(module, SplitLinear) for module in modules)
    assert kind != "qwen3" or any(isinstance(module, SplitFeedForward) for module in modules)
    requests = requests_of([text(9, 1), text(20, 2)])
    assert_answers(adapted, run(adapted.engine(), requests), requests)


def test_the_weights_of_adapters_are_counted(dense: Adapted) -> None:
    alone = load_model(str(dense.path))
    added = 0
    for _, path in dense.adapters:
        weights: Any = mx.load(str(path / "adapters.safetensors"))
        added += sum(array.nbytes for array in weights.values())
    assert dense.served.weight_bytes == alone.weight_bytes + added
    parameters: Any = tree_flatten(dense.served.model.parameters())
    assert sum(array.nbytes for _, array in parameters) == alone.weight_bytes


def test_embeddings_are_those_of_the_model_while_an_adapter_answers(tmp_path: Path) -> None:
    make_embedding_model(tmp_path / "m")
    path = tmp_path / "m-whole"
    write_modules(path, "lasttoken", ("Transformer", "Pooling"))
    vectors: list[Any] = []
    for adapters in ((), (AdapterPath(RED, make_adapter(path, path / RED, 1)),)):
        config = EngineConfig(str(path), kv_cache_bytes=2**22, adapters=adapters)
        served = load_model(str(path), LoadOptions(adapters=adapters))
        embedder = Embedder(own_embedding_model(served, 512), 512)
        core = build_engine(config, served, embedder=embedder)
        core.add(request("one", text(5), 4, adapter=RED if adapters else None))
        core.step()
        asking = EmbeddingRequest("two", [text(9)], embedder.model.facts.dimensions)
        embedder.add(asking)
        embedder.step(alone=False)
        vectors.append(asking.reply.result(0).vectors)
    np.testing.assert_array_equal(vectors[0], vectors[1])


@pytest.mark.models
@pytest.mark.parametrize("name", sorted(ARCHITECTURES.keys() - REFUSED.keys() - NOT_ADAPTED))
def test_adapters_of_every_architecture_are_served(name: str, tmp_path: Path) -> None:
    """When an adapter is loaded, its logits in mixed batches are compared with those of mlx-lm."""
    if not is_installed(name) or ARCHITECTURES[name].cannot_run:
        pytest.skip(ARCHITECTURES[name].cannot_run or "not in this version of mlx-lm")
    path = make_architecture(tmp_path / "m", name)
    load_model(str(path), LoadOptions(adapters=[AdapterPath(RED, make_adapter(path, tmp_path / RED, 1))]))


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(dense: Adapted, tmp_path: Path) -> Path:
    """A copy of an adapter, for a test that spoils it."""
    return shutil.copytree(dense.path / RED, tmp_path / "broken")


def refusal(dense: Adapted, path: Path) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(str(dense.path), LoadOptions(adapters=[AdapterPath("mine", path)]))
    message = str(caught.value)
    assert message.startswith("the adapter 'mine'")
    assert "\n" not in message
    return message


def change(path: Path, **fields: Any) -> Path:
    config = json.loads((path / "adapter_config.json").read_text())
    config["lora_parameters"] |= fields.pop("lora_parameters", {})
    (path / "adapter_config.json").write_text(json.dumps(config | fields))
    return path


def test_directories_that_are_no_adapters_are_refused(dense: Adapted, broken: Path, tmp_path: Path) -> None:
    assert "no such directory" in refusal(dense, tmp_path / "nothing")
    assert "has no adapter_config.json" in refusal(dense, dense.path)
    (broken / "adapters.safetensors").rename(broken / "adapter_model.safetensors")
    assert "has no peft_type, which PEFT writes" in refusal(dense, broken)
    (broken / "adapter_model.safetensors").unlink()
    assert "has no adapters.safetensors" in refusal(dense, broken)
    (broken / "adapters.safetensors").write_bytes(b"damaged")
    refusal(dense, broken)
    (broken / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(dense, broken)
    (broken / "adapter_config.json").write_text("{}")
    assert "num_layers" in refusal(dense, broken)


def test_a_full_fine_tune_is_refused_with_what_makes_a_model_of_it(dense: Adapted, broken: Path) -> None:
    message = refusal(dense, change(broken, fine_tune_type="full"))
    assert "mlx_lm.fuse" in message
    assert str(broken) in message


def test_parameters_that_do_not_fit_the_weights_are_refused(dense: Adapted, broken: Path) -> None:
    config = json.loads((broken / "adapter_config.json").read_text())
    scale = config["lora_parameters"].pop("scale")
    (broken / "adapter_config.json").write_text(json.dumps(config))
    assert "scale" in refusal(dense, broken)
    assert "shape" in refusal(dense, change(broken, lora_parameters={"rank": 3, "scale": scale}))


def test_an_adapter_of_another_model_is_refused(dense: Adapted, hybrid: Adapted, tmp_path: Path) -> None:
    refusal(dense, hybrid.path / RED)
    larger = make_architecture(tmp_path / "larger", "qwen3", hidden_size=128)
    refusal(dense, make_adapter(larger, tmp_path / "adapter", 1))


def test_weights_that_are_not_finite_are_refused(dense: Adapted, broken: Path) -> None:
    weights: Any = mx.load(str(broken / "adapters.safetensors"))
    weights[next(iter(weights))][0, 0] = mx.nan
    mx.eval(weights)
    mx.save_safetensors(str(broken / "adapters.safetensors"), weights)
    assert "not finite" in refusal(dense, broken)


def test_an_adapter_that_a_batch_computes_wrongly_is_refused(dense: Adapted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapted_layers, "choose", lambda mask, adapted, base: base)
    assert "does not reproduce" in refusal(dense, dense.path / RED)


@pytest.mark.parametrize("names", [["a:b"], ["latest"], ["a", "a"], [""], ["a/b"]])
def test_names_that_would_be_ambiguous_are_refused(names: list[str]) -> None:
    with pytest.raises(ValueError, match="adapter"):
        EngineConfig(adapters=tuple(AdapterPath(name, Path("/x")) for name in names))
