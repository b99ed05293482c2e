#!/usr/bin/env bash
# An integer index into an MLX array copies. NumPy and PyTorch give a view.
#
# `a[0]` of an array [2, 4096, 4096] is a gather, and takes 64 MiB. `a[0:1].squeeze(0)` has the same elements and takes
# none. So matrices that are stacked and taken by their index in each call are copied in each call.
# Seen with mlx 0.32.4 on a CPU. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check "mlx[cpu]==0.32.4"

cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import pathlib
import re

import mlx.core as mx

stacked = mx.ones((2, 4096, 4096))
mx.eval(stacked)


def taken(matrix):
    """Its operations, and the MiB that it takes."""
    mx.export_to_dot("graph.dot", matrix)
    operations = re.findall(r'label ?= ?"([A-Z][a-z]\w+)"', pathlib.Path("graph.dot").read_text())
    before = mx.get_active_memory()
    mx.eval(matrix)
    return operations, round((mx.get_active_memory() - before) / 2**20)


by_index, by_slice = taken(stacked[0]), taken(stacked[0:1].squeeze(0))
print(f"[0]: {by_index}, [0:1].squeeze(0): {by_slice}")
assert by_index == (["Gather", "Squeeze"], 64), by_index
assert by_slice == (["Slice", "Squeeze"], 0), by_slice
PY
