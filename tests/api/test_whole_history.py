"""Chat templates that lose a part of a conversation, or show it in another place: what the server shows instead."""

from __future__ import annotations

import pytest

from tests.api.test_template_forms import CALLS, GPT_OSS, GREETING, QUESTION, prompt_of, result
from tests.support import RunningServer

AGAIN = {"role": "user", "content": "And now?"}


def test_gpt_oss_is_shown_a_text_before_a_call_after_its_answer(
    monkeypatch: pytest.MonkeyPatch, demo_server: RunningServer
) -> None:
    """Its template drops the thoughts before an answer. The text is none, for the user has read it."""
    drops = GPT_OSS.replace(
        "{%- if m.content and m.thinking %}",
        """{%- set later = namespace(answer=false) %}{% for each in messages[loop.index:] %}
        {%- if each.role == 'assistant' and not each.tool_calls %}{% set later.answer = true %}{% endif %}{% endfor %}
        {%- if m.content and m.thinking %}""",
    ).replace("{{ m.content or m.thinking }}", "{{ (m.content or m.thinking) if not later.answer }}")
    assert drops.count("later.answer") == 2
    said = CALLS | {"content": "I will ask.", "reasoning_content": "Two cities."}
    turn = [QUESTION, said, result("a", "21 degrees"), result("b", "4 o'clock")]
    now = prompt_of(monkeypatch, demo_server, drops, turn)
    assert "<|channel|>analysis<|message|>Two cities.\n\nI will ask." in now
    later = prompt_of(monkeypatch, demo_server, drops, [*turn, GREETING, AGAIN])
    assert "<assistant>I will ask.<|channel|>analysis" in later
    assert "Two cities." not in later
