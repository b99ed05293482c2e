#!/usr/bin/env bash
# transformers 5 drops the pre-tokenizer of a tokenizer.json for a directory whose class it rebuilds.
#
# A published kind of file: byte-level BPE with Digits before ByteLevel, class GPT2Tokenizer, model type llama (SmolLM).
# `AutoTokenizer` gives "12" one token, and the file's own rules give it two. Nothing is said.
# Seen with transformers 5.23.0 and tokenizers 0.23.3. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check transformers==5.23.0 tokenizers==0.23.3

cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import json
import pathlib

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

directory = pathlib.Path("model")
directory.mkdir()
alphabet = sorted({*pre_tokenizers.ByteLevel.alphabet(), "12"})
rules = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, [("1", "2")]))
digits = pre_tokenizers.Digits(individual_digits=True)
rules.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
rules.decoder = decoders.ByteLevel()
rules.save(str(directory / "tokenizer.json"))
(directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
(directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))

by_file = Tokenizer.from_file(str(directory / "tokenizer.json")).encode("12").tokens
by_class = transformers.AutoTokenizer.from_pretrained(directory)
got = by_class.convert_ids_to_tokens(by_class("12", add_special_tokens=False)["input_ids"])
print(f"transformers {transformers.__version__}: the file's rules make {by_file}, {type(by_class).__name__} makes {got}")
assert by_file == ["1", "2"], by_file
assert got == ["12"], got
PY
