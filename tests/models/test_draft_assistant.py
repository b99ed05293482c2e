"""Assistants in files of their own: which model they fit, and how their weights are stored."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.drafts.draft_assistant import Assistant
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import LoadOptions, ServedModel, load_model
from mlxpaged.models.turns import Turns
from mlxpaged.parts.drafting.draft_loading import with_draft_model
from mlxpaged.parts.drafting.drafting import Drafting
from tests.engine.helpers import make_core, part_of
from tests.engine.test_draft_head import logged
from tests.engine.test_drafting import answers, as_many, requests, tokens_of
from tests.models.architectures import make_architecture
from tests.models.draft_assistants import NUM_BEST, NUM_CLUSTERS, VOCAB_SIZE, AssistantReference, make_assistant


@pytest.fixture(params=[False, True], ids=["dense", "clusters"])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> AssistantReference:
    return make_assistant(tmp_path / "m", request.param)


@pytest.fixture
def dense(tmp_path: Path) -> AssistantReference:
    return make_assistant(tmp_path / "m", has_clusters=False)


def load(reference: AssistantReference) -> ServedModel:
    return load_model(str(reference.path), LoadOptions(drafts=True, mtp_path=reference.mtp))


def assistant_of(served: ServedModel) -> Assistant:
    assert isinstance(served.mtp, Assistant)
    return served.mtp


def test_it_adds_no_layers_and_reads_those_that_write(reference: AssistantReference) -> None:
    plain, served = load_model(str(reference.path)), load(reference)
    assistant = assistant_of(served)
    assert served.layers == plain.layers
    assert served.num_drafting == 0
    assert list(assistant.sources) == [2, 2, 3]
    assert served.weight_bytes == plain.weight_bytes + assistant.nbytes
    embedding = VOCAB_SIZE * 32 * 4
    unread = embedding - embedding * NUM_BEST // NUM_CLUSTERS if reference.has_clusters else 0
    assert assistant.nbytes - assistant.bytes_read == unread


def test_a_draft_model_may_be_one(dense: AssistantReference) -> None:
    """It drafts as one that --mtp names does."""
    plain = load_model(str(dense.path))
    expected = answers(make_core(plain), requests(4))
    config = EngineConfig(speculative="draft", draft_model=dense.mtp)
    core = make_core(with_draft_model(config, plain, Turns()), speculative="draft", draft_model=dense.mtp)
    drafting = part_of(core, Drafting)
    assert drafting.names == ["grammar", "mtp"]
    drafting.budget.lengths = as_many
    drafts = logged(core)
    assert tokens_of(answers(core, requests(4))) == tokens_of(expected)
    greedy = [each for each in drafts if each[0] == "r0"]
    assert len(greedy) > 20
    assert all(dense.drafts(tokens, len(found)) == found for _, tokens, found in greedy[::4])


@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "affine"), (4, "mxfp4")])
def test_quantized_tensors_are_kept(reference: AssistantReference, bits: int, mode: str) -> None:
    file = f"{reference.mtp}/model.safetensors"
    tensors: dict[str, mx.array] = {}
    loaded: Any = mx.load(file)
    for name, array in loaded.items():
        base = name.removesuffix(".weight")
        if array.ndim == 2 and name != "lm_head.weight":
            parts = mx.quantize(array, 32, bits, mode)
            tensors |= dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=False))
        else:
            tensors[name] = array
    mx.save_safetensors(file, tensors)
    served = load(reference)
    weights: Any = dict(tree_flatten(assistant_of(served).head))
    assert weights["pre_projection.weight"].dtype == mx.uint32
    assert weights["model.embed_tokens.weight"].dtype == mx.uint32
    core = make_core(served, speculative="mtp")
    drafting = part_of(core, Drafting)
    drafting.budget.lengths = as_many
    plain = make_core(load_model(str(reference.path)))
    assert tokens_of(answers(core, requests(2))) == tokens_of(answers(plain, requests(2)))
    assert drafting.stats().drafted_total > 40


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("backbone_hidden_size", 96, "its hidden size is 96, not 64"),
        ("vocab_size", 512, "its vocabulary is 512, not 256"),
        ("head_dim", 32, "its head size is 32, not 16"),
        ("sliding_window", 64, "its window is 64, not 12"),
        ("layer_types", ["chunked_attention"] * 3, "cannot be loaded"),
        ("num_hidden_layers", 4, "cannot be loaded"),
        ("text_config", None, "cannot be loaded"),
    ],
)
def test_one_of_another_model_is_refused(dense: AssistantReference, field: str, value: Any, reason: str) -> None:
    text = dense.config["text_config"]
    if field in text:
        dense.config["text_config"] = text | {field: value}
    else:
        dense.config[field] = value
    dense.save()
    with pytest.raises(UnsupportedModelError, match=reason):
        load(dense)


def test_clusters_of_other_sizes_are_refused(tmp_path: Path) -> None:
    reference = make_assistant(tmp_path / "m", has_clusters=True)
    reference.config["num_centroids"] = NUM_CLUSTERS + 1
    reference.save()
    with pytest.raises(UnsupportedModelError, match="are not equally large"):
        load(reference)


def test_a_model_of_another_kind_has_none(dense: AssistantReference, tmp_path: Path) -> None:
    llama = make_architecture(tmp_path / "llama", "llama")
    with pytest.raises(UnsupportedModelError, match=r"--mtp .*assistant: it is an assistant of Gemma 4"):
        load_model(str(llama), LoadOptions(drafts=True, mtp_path=dense.mtp))
    with pytest.raises(UnsupportedModelError, match="it is an assistant of Gemma 4"):
        with_draft_model(EngineConfig(speculative="draft", draft_model=dense.mtp), load_model(str(llama)), Turns())


def test_ranks_have_no_assistant(dense: AssistantReference) -> None:
    """Each has a part of the heads."""
    config = EngineConfig(speculative="draft", draft_model=dense.mtp)
    ranks: Any = SimpleNamespace(leads=True)
    with pytest.raises(UnsupportedModelError, match="only a part of the heads that an assistant reads"):
        with_draft_model(config, load_model(str(dense.path)), Turns(), ranks)


def test_an_assistant_is_not_served_alone(dense: AssistantReference) -> None:
    with pytest.raises(UnsupportedModelError, match="drafts for a Gemma 4 model: name it with --mtp"):
        load_model(dense.mtp)


def test_damaged_weights_are_refused(dense: AssistantReference) -> None:
    file = Path(dense.mtp) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UnsupportedModelError, match="cannot be loaded"):
        load(dense)
