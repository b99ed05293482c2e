#!/usr/bin/env bash
# llguidance's grammar of a JSON schema has not all JSON, and with its own option a listed text loses a character.
#
# A string may have \u for control characters only, and never \/. So a model that begins `caf\u` for an é can only go on
# with `\u00`, and its text becomes another one. `json_allowed_escapes` without `u` does not refuse a listed text with a
# control character that has no short escape: the grammar allows the text without that character instead.
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


def matcher_of(schema, **options):
    text = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    matcher = LLMatcher(LLTokenizer("byte"), text)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def allowed(schema, text, **options):
    data = list(text.encode())
    return matcher_of(schema, **options).validate_tokens(data) == len(data)


TEXT = {"type": "string"}
for spelled in (r'"caf\u00e9"', r'"a\/b"', r'"caf\u0009"'):
    print(f"llguidance {version('llguidance')}: {spelled} is {json.loads(spelled)!r}: {allowed(TEXT, spelled)}")
assert not allowed(TEXT, r'"caf\u00e9"')
assert not allowed(TEXT, r'"a\/b"')
assert allowed(TEXT, r'"caf\u0009"')
assert not allowed(TEXT, r'"caf\u1')

listed = {"enum": ["y\u0001"]}
for spelled in (r'"y\u0001"', '"y"'):
    found = [allowed(listed, spelled), allowed(listed, spelled, json_allowed_escapes='nrbtf"\\')]
    print(f"{spelled} for the listed 'y\\x01', by default and without u: {found}")
assert [allowed(listed, r'"y\u0001"'), allowed(listed, '"y"')] == [True, False]
assert not allowed(listed, r'"y\u0001"', json_allowed_escapes='nrbtf"\\')
assert allowed(listed, '"y"', json_allowed_escapes='nrbtf"\\')
PY
