#!/usr/bin/env bash
# With `multipleOf` 0.25, llguidance takes 5 and 5.50, and refuses 5.5 and 0.5, which are the same numbers.
#
# It counts the places of the divisor: a fraction has all of them or is left out. No program writes 5.50 for 5.5, so a
# model that begins as programs do must go on with a zero, and text that another validator takes is not allowed.
# Seen with llguidance 1.9.1. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1

cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

SCHEMA = {"type": "number", "multipleOf": 0.25}


def allowed(text):
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA)))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


found = {text: allowed(text) for text in ("5", "5.25", "5.50", "5.5", "0.5")}
print(f"llguidance {version('llguidance')}, {SCHEMA}: {found}")
assert all(json.loads(text) % SCHEMA["multipleOf"] == 0 for text in found)
assert found == {"5": True, "5.25": True, "5.50": True, "5.5": False, "0.5": False}
PY
