"""Chat templates that never end, or that make more than any memory holds, and ordinary ones, which render as before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlx_lm.utils import load_tokenizer
from transformers.utils import chat_template_utils

from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH, load_model
from mlxpaged.models.text.templates import renderer
from mlxpaged.models.text.templates.renderer import TemplateError, TemplateLimitError, render, variables_of
from mlxpaged.models.text.tokenizer import ChatTemplateError, Tokenizer
from tests.support import make_tiny_model

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c\nd"}]
NINES = "9" * 10

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "one operation": "{% set a = 9 %}{{ a ** (a ** a) }}",
    "one operation while it is compiled": "{{ 9 ** (9 ** 9) }}",
}
LARGE = {
    "a product": "{{ 'x' * " + NINES + " }}",
    "sums": "{% set n = namespace(a='xx') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "kept texts": "{% set n = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set n.a = n.a + [('x' * 9999) ~ i] %}{% endfor %}",
}
LONG = "{% set a = 'x' * 65536 %}{% for i in range(1025) %}{{ a }}{% endfor %}"


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "SECONDS", 0.05)
    monkeypatch.setattr(renderer, "MAX_MEMORY", 2**27)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_an_end_is_stopped(name: str) -> None:
    with pytest.raises(TemplateLimitError, match=r"^it takes more than 0\.05 seconds$"):
        render(ENDLESS[name], {})


def test_a_process_whose_first_line_no_one_reads_ends_without_a_word() -> None:
    """As when the server ends while it starts."""
    reader, writer = os.pipe()
    os.close(reader)
    with subprocess.Popen(
        [sys.executable, str(renderer.PROGRAM), "1"], stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE
    ) as child:
        os.close(writer)
        assert child.stderr is not None
        assert child.stderr.read() == b""


def test_a_rendering_that_is_not_watched_any_more_ends() -> None:
    """As when the server is killed. The processor time is that of each request."""
    command = [sys.executable, str(renderer.PROGRAM), "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        for source in ("x", ENDLESS["one operation"]):
            child.stdin.write(json.dumps({"source": source, "variables": {}}).encode() + b"\n")
            child.stdin.flush()
            assert child.stdout.readline() == (b'{"text": "x"}\n' if source == "x" else b"")
        assert child.wait() == -signal.SIGXCPU


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_too_much_memory_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "MAX_MEMORY", 2**27)
    with pytest.raises(TemplateLimitError, match=r"^it takes more than 128 MB of memory$"):
        render(LARGE[name], {})


def test_a_template_that_makes_a_too_long_text_is_refused() -> None:
    with pytest.raises(TemplateLimitError, match=r"^it makes a text of more than 67,108,864 characters$"):
        render(LONG, {})


def test_a_template_that_asks_for_more_memory_than_any_machine_has_is_refused() -> None:
    with pytest.raises(TemplateLimitError, match=r"^it asks for more memory than there is$"):
        render("{{ [1] * 10 ** 17 }}", {})


def test_a_template_of_too_many_characters_is_refused() -> None:
    with pytest.raises(TemplateLimitError, match=r"^it has more than 262,144 characters$"):
        render(" " * 262_145, {})


@pytest.mark.parametrize("source", ["{{ " + "(" * 90_000 + ")" * 90_000 + " }}", "{% if", "{% nothing %}"])
def test_a_text_that_is_no_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        render(source, {})
    with pytest.raises(TemplateError):
        variables_of(source)


ORDINARY = [
    "{{ messages[0].content.strip().split(' ')[-1].upper() ~ 1 ~ none ~ [1, 'a'] }}",
    "{% for m in messages[::-1] %}{{ loop.index }}{{ loop.last }}{{ m.role + ':' + m['content'] + '\n' }}{% endfor %}",
    "{% set n = namespace(found=false, a=[]) %}{% for m in messages %}{% set n.a = n.a + [m] %}{% endfor %}{{ n.a }}",
    "{% for m in messages if m.role == 'user' %}{{ m|tojson(indent=2) }}{{ loop.length }}{% endfor %}",
    "{{ messages|tojson }}{{ {'a': messages[0].role, 'b': (1, messages)}|items|list }}",
    "{% macro m(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, c=[4]) }}",
    "{% call(x) m() %}{{ x }}{% endcall %}".join(["{% macro m() %}{{ caller(1) }}{% endmacro %}", ""]),
    "{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|join(', ')|trim('a') }}",
    "{{ messages.x is defined }}{{ messages[0].x }}{{ messages[0].get('x', 'y') }}{{ messages[0].items()|list }}",
    "{{ messages[0].update }}{{ messages[0]['content'].format() }}{{ 'a'.nothing is undefined }}",
    "{{ '%s and %5.2f' % ('a', 1.5) }}{{ '{} {:>4} {a!r}'.format(1, 2, a='b') }}{{ '%s'|format('a') }}",
    "{{ 'a' * 3 + 'b' }}{{ [1] * 2 + [3] }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 1.5 * 2 + 1 }}{{ (1,) + (2,) }}",
    "{{ ('<b>'|safe) + '<i>' }}{{ '<' ~ ('<b>'|safe) }}{{ '<'|e }}{{ 'a\tb'.expandtabs(4) }}{{ 'x'.center(5) }}",
    "{{ 'a\nb'|indent(2) }}{{ 'b a'.replace('a', 'ccc') }}{{ 'aXbX'|replace('X', 'yy', 1) }}{{ 'abc'|list }}",
    "{{ range(3)|sum }}{{ [3, 1, 2]|sort }}{{ [1, 2, 3]|batch(2, 0)|list }}{{ 'abc'|slice(2)|list }}{{ 1.26|round }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{% for i in [1, 2, 3] %}{% break %}{% endfor %}",
    "{{ dict(a=1).items()|list }}{{ joiner() is callable }}{{ 'a b'.split() }}{{ 'a\nb'.splitlines() }}",
    "{% filter upper %}{% set a %}x{{ 1 }}{% endset %}{{ a }}{% endfilter %}{% block b %}{{ 1 + 2 }}{% endblock %}",
    "{{ raise_exception('no system messages') }}",
    "{{ 'a' + 1 }}",
    "{{ messages.append(1) }}",
    "{{ ''.__class__ }}{{ messages[0].__class__ }}",
    "{{ messages[0]['__class__'] }}",
]


@pytest.mark.parametrize("template", ORDINARY)
def test_an_ordinary_template_renders_as_in_transformers(template: str) -> None:
    def expected() -> str:
        try:
            compiled = chat_template_utils._cached_compile_jinja_template(template)
            return str(compiled.render(messages=MESSAGES, tools=None))
        except Exception as error:
            return f"error: {error}"

    try:
        text = render(template, {"messages": MESSAGES, "tools": None})
    except TemplateError as error:
        text = f"error: {error}"
    assert text == expected()


def test_a_text_that_is_not_unicode_is_rendered() -> None:
    assert render("{{ a }}{{ b|tojson }}", {"a": "\ud800\n", "b": "\U0001f642\udfff"}) == '\ud800\n"\U0001f642\udfff"'


def test_transformers_renders_templates_in_another_process() -> None:
    """Only this server's own environment sets no limits of its own."""
    rendered, _ = chat_template_utils.render_jinja_template([MESSAGES], chat_template="{{ messages[0].content }}")
    assert rendered == ["a b"]
    with pytest.raises(TemplateLimitError, match="262,144 characters"):
        chat_template_utils.render_jinja_template([MESSAGES], chat_template=" " * 262_145)


def children() -> list[psutil.Process]:
    """The processes that render, of this one."""
    return [each for each in psutil.Process().children() if str(renderer.PROGRAM) in each.cmdline()]


def test_one_process_renders_again_and_again_and_ends_with_the_others() -> None:
    renderer.end_children()
    for _ in range(9):
        assert render("{{ 1 + 1 }}", {}) == "2"
    assert len(children()) == 1
    renderer.end_children()
    assert children() == []


def test_a_process_that_has_become_large_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer.end_children()
    monkeypatch.setattr(renderer, "IDLE_MEMORY", 2**20)
    assert render("{{ 1 }}", {}) == "1"
    assert children() == []


def test_a_process_that_was_killed_is_replaced() -> None:
    renderer.end_children()
    render("", {})
    (child,) = children()
    child.kill()
    child.wait()
    assert render("{{ 1 }}", {}) == "1"


def test_a_process_that_is_killed_while_it_renders_is_an_error_of_this_rendering(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kill(process: psutil.Process) -> Any:
        os.kill(process.pid, signal.SIGKILL)
        raise psutil.NoSuchProcess(process.pid)

    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "cpu_times", kill)
        with pytest.raises(TemplateLimitError, match=r"^the process that renders it ended with status -9$"):
            render(ENDLESS["loops"], {})
    assert render("{{ 1 }}", {}) == "1"


@pytest.mark.usefixtures("small_limits")
def test_a_model_whose_template_never_ends_is_refused_at_load(tmp_path: Path) -> None:
    path = make_tiny_model(tmp_path / "m", "llama")
    (path / "chat_template.jinja").write_text(ENDLESS["loops"])
    with pytest.raises(UnsupportedModelError) as error:
        load_model(str(path))
    reason = "its chat template is refused: it takes more than 0.05 seconds"
    assert str(error.value) == f"{path} cannot be loaded: {reason}"


@pytest.mark.usefixtures("small_limits")
def test_a_request_whose_rendering_never_ends_is_refused_and_the_next_is_served() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = "{% if messages[0].content == 'bad' %}" + ENDLESS["loops"] + "{% endif %}answer:"
    tokenizer = Tokenizer(wrapped)
    with pytest.raises(ChatTemplateError, match=r"cannot render these messages: it takes more than 0\.05 seconds"):
        tokenizer.apply_chat_template([{"role": "user", "content": "bad"}])
    assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "good"}])) == "answer:"


@pytest.mark.usefixtures("small_limits")
def test_a_template_that_never_ends_with_tools_shows_none() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = "{% if tools %}" + ENDLESS["loops"] + "{% endif %}<tool_call>{{ messages[0].tool_calls }}"
    tokenizer = Tokenizer(wrapped)
    assert not tokenizer.shows_tools
    tokens = tokenizer.apply_chat_template([{"role": "user", "content": "good"}])
    assert tokenizer.text_with_specials(tokens).startswith("<tool_call>")


def test_without_a_process_a_rendering_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    tokenizer = Tokenizer(wrapped)
    renderer.end_children()
    monkeypatch.setattr(renderer, "PROGRAM", Path("/nowhere"))
    with pytest.raises(ChildProcessError, match="did not start"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    monkeypatch.setattr("sys.executable", "/nowhere")
    with pytest.raises(FileNotFoundError):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


def test_the_message_of_a_template_is_cut() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = "{{ raise_exception('x' * 4000 + 'y') }}"
    with pytest.raises(ChatTemplateError) as error:
        Tokenizer(wrapped).apply_chat_template([{"role": "user", "content": "hi"}])
    assert len(str(error.value)) < 2100
