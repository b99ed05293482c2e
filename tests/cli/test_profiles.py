"""`--profile`: what it says, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxpaged import cli
from mlxpaged.cli import serve
from mlxpaged.cli.config_file import ConfigFile
from mlxpaged.cli.profiles import check_names, profile
from mlxpaged.core.text.thinking_limit import ThinkingLimit
from mlxpaged.registry.profile import Profile

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_profile_has_a_name_a_model_and_defaults(tmp_path: Path) -> None:
    assert profile("fast=qwen3.6:27b") == Profile("fast", "qwen3.6:27b")
    given = "fast = a/b , thinking=off,temperature=0.7, top_k=20,min-p=0.1,thinking_budget=30%,max_tokens=900"
    sampling = {"temperature": 0.7, "top_k": 20, "min_p": 0.1}
    limit = ThinkingLimit(share=0.3)
    expected = Profile("fast", "a/b", sampling, max_tokens=900, thinking=False, thinking_limit=limit)
    assert profile(given) == expected
    assert expected.shown == sampling | {"max_tokens": 900, "thinking": False, "thinking_budget": "30%"}
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    found = profile(f"p=m,chat_template={tmp_path / 't.jinja'},thinking=on")
    assert (found.chat_template, found.thinking) == (TEMPLATE, True)


def test_the_system_text_is_the_last_one_and_may_have_commas_or_be_a_file(tmp_path: Path) -> None:
    assert profile("p=m,system=Be brief, kind, and x=y.").system == "Be brief, kind, and x=y."
    (tmp_path / "system.txt").write_text("Be brief.\n")
    assert profile(f"p=m,top_p=0.5,system=@{tmp_path / 'system.txt'}").system == "Be brief.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "must be NAME=MODEL,KEY=VALUE"),
        ("=m", "must be NAME=MODEL,KEY=VALUE"),
        ("p=", "must be NAME=MODEL,KEY=VALUE"),
        ("p=m,temperature=5", "profile 'p': temperature must be a number from 0 to 2, got '5'"),
        ("p=m,temperature=", "profile 'p': temperature must be"),
        ("p=m,top_k=1.5", "profile 'p': top_k must be"),
        ("p=m,thinking=maybe", "profile 'p': thinking must be one of on, off, got 'maybe'"),
        ("p=m,thinking_budget=0", "profile 'p': thinking_budget must be a number of tokens"),
        ("p=m,max_tokens=0", "profile 'p': max_tokens must be a whole number of at least 1"),
        ("p=m,temprature=1", "profile 'p': 'temprature' is none of .*; did you mean temperature?"),
        ("p=m,thinking", "profile 'p': 'thinking' is none of"),
        ("p=m,", "profile 'p': '' is none of"),
        ("p=m,top_p=0.5,top_p=0.6", "profile 'p': top_p is given twice"),
        ("p=m,system= ", "profile 'p': system must not be empty"),
        ("p=m,system=@no/where", "profile 'p': system 'no/where' cannot be read: No such file"),
        ("p=m,chat_template=no/where", "profile 'p': chat_template 'no/where' cannot be read"),
    ],
)
def test_a_bad_value_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(Exception, match=message):
        profile(text)


def test_a_template_that_jinja_cannot_read_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for %}")
    with pytest.raises(Exception, match=r"profile 'p': chat_template .* is no chat template"):
        profile(f"p=m,chat_template={tmp_path / 't.jinja'}")


def test_a_name_stands_for_one_model() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        check_names([Profile("a", "m"), Profile("a", "n")], [])
    with pytest.raises(ValueError, match="'a' is a model's name or an alias already"):
        check_names([Profile("a", "m")], ["m", "a"])


def registry(*arguments: str) -> Any:
    args = cli.make_parser(["serve"], ConfigFile.read()).parse_args(["serve", *arguments])
    return serve.server_models(args)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises((ValueError, SystemExit)) as raised:
        registry(*arguments)
    return str(raised.value) + capsys.readouterr().err


def test_the_server_has_the_profiles_of_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    found = registry("demo", "--alias", "x=demo", "--profile", "cold=demo,temperature=0", "--profile", "y=x,top_k=3")
    assert found.names.served("cold") is found.names.served("y") is found.default
    assert found.default.names == ("demo", "cold", "y")
    assert found.names.profile_in("cold:latest").sampling == {"temperature": 0.0}
    assert found.names.profile_in("demo") is None
    assert "no model 'b' is served" in refusal(capsys, "demo", "--profile", "a=b")
    assert "no model 'a' is served" in refusal(capsys, "demo", "--profile", "a=demo", "--profile", "b=a")
    assert "'demo' is a model's name" in refusal(capsys, "demo", "--profile", "demo=demo")
    assert "profile 'a': temperature must be" in refusal(capsys, "demo", "--profile", "a=demo,temperature=9")
    assert "--profile needs a MODEL" in refusal(capsys, "none", "--profile", "a=demo")


def test_the_variable_and_the_file_have_profiles_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXPAGED_PROFILE", "a=demo,temperature=0,top_k=1; b=demo,thinking=off")
    assert registry("demo").default.names == ("demo", "a", "b")
    monkeypatch.delenv("MLXPAGED_PROFILE")
    file = tmp_path / "config.toml"
    lines = 'profile = ["c=demo,temperature=0", "d=demo,system=Be kind, and brief."]', 'thinking-budget = "40%"'
    file.write_text("\n".join(lines))
    monkeypatch.setenv("MLXPAGED_CONFIG", str(file))
    found = registry("demo")
    assert found.default.names == ("demo", "c", "d")
    assert found.profiles["d"].system == "Be kind, and brief."
    assert found.default.config.thinking_limit == ThinkingLimit(share=0.4)
