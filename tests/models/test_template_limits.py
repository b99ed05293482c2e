"""Chat templates that never end, or that make more than any memory holds, and ordinary ones, which render as before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2.sandbox
import pytest
from mlx_lm.utils import load_tokenizer
from transformers.utils import chat_template_utils

from mlxpaged.models import template_limits
from mlxpaged.models.errors import UnsupportedModelError
from mlxpaged.models.loader import DEMO_PATH, load_model
from mlxpaged.models.template_environment import LimitedEnvironment
from mlxpaged.models.template_limits import TemplateLimitError
from mlxpaged.models.tokenizer import ChatTemplateError, Tokenizer
from tests.support import make_tiny_model

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c\nd"}]
NINES = "999999999"

ENDLESS = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "loops with a condition": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in [[1] * 9] recursive %}{{ loop([[a] * 9]) }}{{ loop([a, a]) }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "generators": "{% for a in range(99999) %}{{ range(99999)|map('string')|reject|list }}{% endfor %}",
    "slices": "{{ [1]|slice(10 ** 15)|list }}",
    "a loop over slices": "{% for a in [1]|slice(10 ** 15) if false %}{% endfor %}",
    "long slices": "{% set a = 'x' * 60000 %}{% for i in range(99999) %}{% set b = a[1:] %}{% endfor %}",
}
LARGE = {
    "a product": "{{ 'x' * " + NINES + " }}",
    "a product on the left": "{{ " + NINES + " * ['x'] }}",
    "a product of a variable": "{% set n = " + NINES + " %}{{ 'x' * n }}",
    "sums": "{% set n = namespace(a='xx') %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "a long sum": "{% set a = 'x' * 60000 %}{{ " + " + ".join("a" * 99) + " }}",
    "joined": "{% set n = namespace(a='xx') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    "sums of lists": "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = n.a + n.a %}{% endfor %}",
    "lists in lists": "{% set n = namespace(a=[1]) %}{% for i in range(99) %}{% set n.a = [n.a, n.a] %}{% endfor %}",
    "tuples in tuples": "{% set n = namespace(a=1) %}{% for i in range(99) %}{% set n.a = (n.a, n.a) %}{% endfor %}",
    "dictionaries": "{% set n = namespace(a=1) %}{% for i in range(99) %}"
    "{% set n.a = {'a': n.a, 'b': n.a} %}{% endfor %}",
    "built dictionaries": "{% set n = namespace(a=1) %}{% for i in range(99) %}"
    "{% set n.a = dict(a=n.a, b=n.a) %}{% endfor %}",
    "arguments": "{% macro m(n) %}{% if n %}{{ m(n - 1, varargs, varargs) }}{% else %}{{ varargs }}{% endif %}"
    "{% endmacro %}{{ m(99, 1, 1) }}",
    "namespaces": "{% set n = namespace(a=1) %}{% set m = namespace(a=n, b=n) %}{{ m }}",
    "namespaces in a message": "{% set n = namespace(a=1) %}{{ raise_exception(n) }}",
    "namespaces in lists": "{% set n = namespace(a=1) %}{{ [n, n] }}",
    "escaped namespaces": "{% set n = namespace(a=1) %}{{ n|e }}",
    "output": "{% set a = 'x' * 60000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "output of a macro": "{% macro m() %}{% for i in range(99999) %}yyyyyyyyyy{% endfor %}{% endmacro %}{{ m() }}",
    "kept texts": "{% set n = namespace(a=[]) %}{% for i in range(99999) %}"
    "{% set n.a = n.a + [('x' * 999) ~ i] %}{% endfor %}",
    "numbers": "{% set n = namespace(a=9) %}{% for i in range(99) %}{% set n.a = n.a * n.a %}{% endfor %}",
    "powers": "{{ 9 ** (9 ** 9) }}",
    "powers of a variable": "{% set a = 9 %}{{ a ** " + NINES + " }}",
    "center": "{{ 'x'.center(" + NINES + ") }}",
    "ljust": "{% set a = 'x' %}{{ a.ljust(" + NINES + ") }}",
    "rjust": "{{ messages[0].content.rjust(" + NINES + ") }}",
    "zfill": "{{ 'x'.zfill(" + NINES + ") }}",
    "expandtabs": "{{ '\\t'.expandtabs(" + NINES + ") }}",
    "bytes": "{{ 'x'.encode().ljust(" + NINES + ") }}",
    "to_bytes": "{{ (1).to_bytes(" + NINES + ", 'big') }}",
    "a replacement": "{% set a = 'x' * 9999 %}{{ a.replace('x', a) }}",
    "a replacement of nothing": "{% set a = 'x' * 9999 %}{{ a.replace('', a) }}",
    "a replacement by a filter": "{% set a = 'x' * 9999 %}{{ a|replace('x', a) }}",
    "join": "{{ ('x' * 9999).join('x' * 9999) }}",
    "join of a generator": "{{ ('x' * 9999).join(range(9999)|map('string')) }}",
    "join by a filter": "{{ range(9999)|join('x' * 9999) }}",
    "join of defaults": "{{ (messages * 99)|map(attribute='z', default='x' * 9999)|join }}",
    "format": "{{ '{:" + NINES + "}'.format(1) }}",
    "format of a width": "{{ '{:{}}'.format(1, " + NINES + ") }}",
    "repeated format": "{% set a = 'x' * 9999 %}{{ ('{0}' * 99).format(a) }}",
    "format_map": "{{ '{a:" + NINES + "}'.format_map({'a': 1}) }}",
    "percent": "{{ '%" + NINES + "d' % 1 }}",
    "percent of a width": "{{ '%*d' % (" + NINES + ", 1) }}",
    "percent of a precision": "{{ '%.9999999f' % 1.5 }}",
    "repeated percent": "{% set a = 'x' * 9999 %}{{ ('%(a)s' * 99) % {'a': a} }}",
    "format by a filter": "{{ '%" + NINES + "d'|format(1) }}",
    "center by a filter": "{{ 'x'|center(" + NINES + ") }}",
    "a mapped filter": "{{ ['x']|map('center', " + NINES + ")|list }}",
    "indent": "{{ 'x'|indent(" + NINES + ", true) }}",
    "indent of lines": "{{ ('\\n' * 9999)|indent(9999, true, true) }}",
    "indent by a text": "{{ ('\\n' * 9999)|indent('x' * 9999, true, true) }}",
    "JSON": "{{ {'a': 1}|tojson(indent=" + NINES + ") }}",
    "JSON by a text": "{{ (messages * 99)|tojson(indent='x' * 9999) }}",
    "JSON with separators": "{{ ([1] * 999)|tojson(separators=('x' * 9999, '')) }}",
    "a filled batch": "{{ [1]|batch(" + NINES + ", 'x')|list }}",
    "sums by a filter": "{{ [[1], [2]]|sum(start=[]) }}",
    "characters": "{{ ('x' * 60000)|list }}",
    "lines": "{{ ('\\n' * 60000).splitlines() }}",
    "words": "{{ ('x ' * 30000).split() }}",
    "parts": "{{ ('x ' * 30000).split(' ') }}",
    "translate": "{{ 'x'.translate({120: 'y'}) }}",
    "wordwrap": "{{ 'x'|wordwrap(1) }}",
    "pprint": "{{ messages|pprint }}",
    "autoescape": "{% autoescape true %}{{ 1 }}{% endautoescape %}",
    "a time": "{{ strftime_now('%c' * 9999) }}",
    "a long template": "x" * 400_000,
}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "SECONDS", 0.05)
    monkeypatch.setattr(template_limits, "MAX_VALUE", 100_000)
    monkeypatch.setattr(template_limits, "MAX_MADE", 1_000_000)
    monkeypatch.setattr(template_limits, "MAX_COMPARED", 10_000_000)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    yield
    chat_template_utils._compile_jinja_template.cache_clear()


def render(template: str, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> str:
    rendered, _ = chat_template_utils.render_jinja_template([messages], chat_template=template, **options)
    return str(rendered[0])


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("name", [*ENDLESS, *LARGE])
def test_a_template_without_an_end_is_stopped_with_the_reason(name: str) -> None:
    begin = time.thread_time()
    with pytest.raises(TemplateLimitError, match=r"^it (takes more than 0\.05 s|makes|asks|adds|uses|puts|comp|has)"):
        render(ENDLESS[name] if name in ENDLESS else LARGE[name])
    assert time.thread_time() - begin < 1


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
def test_an_ordinary_template_renders_as_in_the_sandbox_alone(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> str:
        chat_template_utils._compile_jinja_template.cache_clear()
        try:
            return render(template)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    limited = outcome()
    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment", jinja2.sandbox.ImmutableSandboxedEnvironment
    )
    assert limited == outcome()


def test_transformers_compiles_templates_with_limits() -> None:
    assert isinstance(chat_template_utils._compile_jinja_template("x").environment, LimitedEnvironment)


def test_each_rendering_has_a_budget_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_MADE", 5000)
    for _ in range(9):
        assert len(render("{{ 'x' * 1000 }}{% if messages %}{{ 'y' * 1000 }}{% endif %}")) == 2000


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


def test_a_template_of_too_many_characters_is_refused() -> None:
    with pytest.raises(TemplateLimitError, match="more than 262,144 characters"):
        LimitedEnvironment().from_string(" " * 262_145)


def test_the_message_of_a_template_is_cut() -> None:
    wrapped = load_tokenizer(DEMO_PATH)
    wrapped.chat_template = "{{ raise_exception('x' * 4000 + 'y') }}"
    with pytest.raises(ChatTemplateError) as error:
        Tokenizer(wrapped).apply_chat_template([{"role": "user", "content": "hi"}])
    assert len(str(error.value)) < 2100
