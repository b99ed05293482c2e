"""The variables of chat templates about thinking, as the makers write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxpaged.models.text.templates.renderer import variables_of
from mlxpaged.models.text.thinking_variables import efforts_of, switch_of

HY3 = (
    "{% if not reasoning_effort is defined %}{% set reasoning_effort = 'no_think' %}"
    "{% elif reasoning_effort not in ['high', 'low', 'no_think'] %}{{ raise_exception('no') }}{% endif %}"
)
M3 = """{% if thinking_mode is defined and thinking_mode == "disabled" %}</think>{% endif %} When thinking is enabled"""
K3 = (
    "{% if thinking and thinking_effort not in ['low', 'high', 'max'] %}{{ raise_exception('no') }}{% endif %}"
    "{% if thinking is undefined %}{% set thinking = true %}{% endif %}"
)
GPT_OSS = (
    """{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}{{ reasoning_effort }}"""
)
V4 = "{% if thinking and reasoning_effort == 'max' %}All.{% endif %}{% if enable_thinking %}{% endif %}"


@pytest.mark.parametrize(
    ("template", "switch", "off"),
    [
        ("{% if enable_thinking is false %}</think>{% endif %}", "enable_thinking", False),
        ("{% set on = thinking if thinking is defined else false %}", "thinking", False),
        ("{% set reasoning = reasoning if reasoning is not undefined else true %}", "reasoning", False),
        (M3, "thinking_mode", "disabled"),
        (HY3, "reasoning_effort", "no_think"),
        ("{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}", "thinking_budget", 0),
        (GPT_OSS, None, None),
        (
            "{# enable_thinking #}Your thinking: {{ messages[0].thinking }}{% set reasoning = 1 %}{{ reasoning }}",
            None,
            None,
        ),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", "enable_thinking", False),
    ],
)
def test_the_switch_is_the_variable_that_the_template_reads(template: str, switch: str | None, off: Any) -> None:
    """A word in a comment, in a text, of a message or of a value of its own is none."""
    found = switch_of(variables_of(template).__contains__, template)
    assert (found and found.variable, found and found.off) == (switch, off)


@pytest.mark.parametrize(
    ("template", "efforts"),
    [
        ("{{ messages }}", {}),
        (HY3, {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "high", "max": "high"}),
        (K3, {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "max", "max": "max"}),
        (GPT_OSS, {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}),
        (V4, {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "max", "max": "max"}),
    ],
)
def test_an_effort_is_the_nearest_one_that_the_template_takes(template: str, efforts: dict[str, str]) -> None:
    environment = ImmutableSandboxedEnvironment()

    def renders(variables: Mapping[str, Any]) -> bool:
        def raise_exception(text: str) -> None:
            raise ValueError(text)

        try:
            environment.from_string(template).render(thinking=True, raise_exception=raise_exception, **variables)
        except ValueError:
            return False
        return True

    found = efforts_of(variables_of(template).__contains__, template, renders)
    assert {effort: value for effort, [value] in ((name, each.values()) for name, each in found.items())} == efforts


def test_constants_are_not_computed() -> None:
    assert variables_of("{{ 'a' | center(10 ** 12) ~ x }}") == {"x"}
