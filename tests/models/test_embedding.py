"""Which directories state that their models make embeddings, and in which words the others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxpaged.models.encoders.embedding import Pooling, embedding_spec, stated_length, stated_pooling
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import load_embedding_model, load_model, own_embedding_model
from tests.support import make_embedding_model, make_tiny_model, write_modules

LONGEST = 8192


def edit(path: Path, **fields: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | fields))


@pytest.mark.parametrize("pooling", list(Pooling))
@pytest.mark.parametrize("normalize", [True, False])
def test_the_pooling_is_what_the_directory_states(tmp_path: Path, pooling: Pooling, normalize: bool) -> None:
    modules = ("Transformer", "Pooling", "Normalize")[: 3 if normalize else 2]
    spec = embedding_spec(make_embedding_model(tmp_path / "m", pooling.value, modules))
    assert (spec.pooling, spec.normalize) == (pooling, normalize)
    assert (spec.prompt, spec.max_tokens, spec.matryoshka) == ("", 4096, False)


def test_the_newer_way_to_state_the_pooling_is_known() -> None:
    assert stated_pooling({"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": True}) is Pooling.MEAN
    assert stated_pooling({"pooling_mode": ["lasttoken"]}) is Pooling.LAST


def test_sizes_prompt_and_longest_input_are_what_the_directory_states(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m")
    edit(path / "sentence_bert_config.json", max_seq_length=100)
    edit(path / "config_sentence_transformers.json", prompts={"q": "find: "}, default_prompt_name="q")
    edit(path / "config.json", matryoshka_dimensions=[16, 32])
    model = load_embedding_model(str(path), None, LONGEST)
    assert (model.max_tokens, model.spec.prompt) == (100, "find: ")
    assert [size for size in range(1, 64) if model.spec.can_be_cut_to(size)] == [16, 32]
    assert load_embedding_model(str(path), None, 60).max_tokens == 60


@pytest.mark.parametrize(
    ("stated", "of_tokenizer", "found"),
    [
        ({}, {"model_max_length": 100}, 100),  # as sentence-transformers 6 writes it
        ({}, {"model_max_length": 100.0}, 100),
        ({"max_seq_length": None}, {"model_max_length": 100}, 100),
        ({"max_seq_length": 60}, {"model_max_length": 100}, 60),
        ({}, {"model_max_length": int(1e30)}, None),
        ({}, {"model_max_length": 1e30}, None),
        ({}, {"model_max_length": 0}, None),
        ({}, {"model_max_length": True}, None),
        ({}, {"model_max_length": "100"}, None),
        ({}, {}, None),
    ],
)
def test_the_longest_input_stands_in_one_of_two_files(
    stated: dict[str, Any], of_tokenizer: dict[str, Any], found: int | None, tmp_path: Path
) -> None:
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(stated))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    assert stated_length(tmp_path) == found


def edited(name: str, **fields: Any) -> Callable[[Path], None]:
    return lambda path: edit(path / name, **fields)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no modules": (lambda path: (path / "modules.json").unlink(), "has no modules.json"),
    "broken": (lambda path: (path / "modules.json").write_text("{"), "modules.json in .*/ cannot be read"),
    "an object": (lambda path: (path / "modules.json").write_text('{"a": 1}'), "modules.json is not a list of modules"),
    "no pooling": (lambda path: (path / "1_Pooling" / "config.json").unlink(), "config.json in 1_Pooling/ cannot be"),
    "unknown": (
        edited("1_Pooling/config.json", pooling_mode_first_tokens=True, pooling_mode_lasttoken=False),
        "its pooling is first; only one of cls, lasttoken, max, mean, mean_sqrt_len, weightedmean",
    ),
    "largest": (
        edited("1_Pooling/config.json", pooling_mode_max_tokens=True, pooling_mode_lasttoken=False),
        "its pooling is max, which only encoders have",
    ),
    "two": (edited("1_Pooling/config.json", pooling_mode_mean_tokens=True), "is mean and lasttoken; only one of"),
    "none": (edited("1_Pooling/config.json", pooling_mode_lasttoken=False), "its pooling is nothing"),
    "prompts": (edited("config_sentence_transformers.json", prompts=["a"]), "prompts in its .* are no object"),
    "dimensions": (edited("config.json", matryoshka_dimensions=["a"]), r"matryoshka_dimensions \['a'\]"),
    "a number": (edited("1_Pooling/config.json", pooling_mode=1), "its pooling is 1"),
    "bidirectional": (edited("config.json", is_causal=False), "attend to later tokens"),
    "Gemma": (edited("config.json", use_bidirectional_attention=True), "attend to later tokens"),
    "own code": (edited("config.json", auto_map={"AutoModel": "m.M"}), "code of its own"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_here_is_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    change(path := make_embedding_model(tmp_path / "m"))
    with pytest.raises(UnsupportedModelError, match=f"^{path} cannot be used for embeddings: .*{message}"):
        load_embedding_model(str(path), None, LONGEST)


def test_an_architecture_that_mlx_lm_does_not_have_is_refused(tmp_path: Path) -> None:
    edit((path := make_embedding_model(tmp_path / "m")) / "config.json", model_type="deberta")
    with pytest.raises(UnsupportedModelError, match=f"^{path} cannot be loaded: .*model_type 'deberta'"):
        load_embedding_model(str(path), None, LONGEST)


@pytest.mark.parametrize(
    "modules", [("Transformer", "Pooling", "Normalize", "Dense"), ("Transformer", "CNN", "Pooling")]
)
def test_modules_in_another_order_or_of_other_kinds_are_refused(tmp_path: Path, modules: tuple[str, ...]) -> None:
    path = make_embedding_model(tmp_path / "m", modules=modules)
    with pytest.raises(UnsupportedModelError, match=f"asks for {', '.join(modules)}; only Transformer, Pooling, Dense"):
        load_embedding_model(str(path), None, LONGEST)


def test_a_prompt_that_the_pooling_leaves_out_is_refused(tmp_path: Path) -> None:
    path = make_embedding_model(tmp_path / "m")
    edit(path / "config_sentence_transformers.json", prompts={"q": "find: "}, default_prompt_name="q")
    edit(path / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.raises(UnsupportedModelError, match="leaves out the tokens of its prompt"):
        load_embedding_model(str(path), None, LONGEST)


@pytest.mark.parametrize("tied", [True, False])
def test_a_bare_decoder_and_a_whole_model_make_the_same_states(tmp_path: Path, tied: bool) -> None:
    """A whole model may have an output head, which is not needed."""
    bare = make_embedding_model(tmp_path / "m")
    config = json.loads((bare / "config.json").read_text())
    weights = dict(mx.load(str(bare / "model.safetensors")))
    whole = {f"model.{name}": array for name, array in weights.items()}
    if not tied:
        whole["lm_head.weight"] = mx.zeros(weights["embed_tokens.weight"].shape)
    other = make_tiny_model(tmp_path / "other", "qwen3", tie_word_embeddings=tied)
    mx.save_safetensors(str(other / "model.safetensors"), whole)
    write_modules(other, "lasttoken", ("Transformer", "Pooling"))
    assert config["tie_word_embeddings"]
    tokens = mx.array([[5, 6, 7]])
    states = [load_embedding_model(str(path), None, LONGEST).decode(tokens, None) for path in (bare, other)]
    assert mx.array_equal(*states)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "qwen2", "mamba"])
def test_other_decoders_of_mlx_lm_make_embeddings_if_their_states_can_be_read(tmp_path: Path, model_type: str) -> None:
    extra: dict[str, dict[str, Any]] = {
        "gemma3_text": {"sliding_window": 4, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
        "mamba": {"state_size": 8, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "time_step_rank": 4},
    }
    path = make_tiny_model(tmp_path / "m", model_type, tie_word_embeddings=True, **extra.get(model_type, {}))
    write_modules(path, "mean", ("Transformer", "Pooling"))
    if model_type == "mamba":
        with pytest.raises(UnsupportedModelError, match="no decoder whose states"):
            load_embedding_model(str(path), None, LONGEST)
    else:
        model = load_embedding_model(str(path), None, LONGEST)
        assert (model.dimensions, model.max_tokens) == (64, 512)
        assert model.kv_bytes == 512 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, size, bytes


def test_a_model_that_generates_makes_embeddings_only_if_it_states_so(tmp_path: Path) -> None:
    served = load_model(str(path := make_tiny_model(tmp_path / "m", "llama")))
    with pytest.raises(UnsupportedModelError, match=r"has no modules\.json"):
        own_embedding_model(served, LONGEST)
    write_modules(path, "mean", ("Transformer", "Pooling"))
    model = own_embedding_model(served, LONGEST)
    assert (model.name, model.vocab_size, model.spec.pooling) == (served.name, served.vocab_size, Pooling.MEAN)
