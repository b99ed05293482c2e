#!/usr/bin/env bash
# mlx-lm's server answers GET /v1/models with 200 and no body while the hub's cache directory does not exist.
#
# The status and the headers are sent before the cache is scanned, and the scan raises CacheNotFound. That is the state
# of every machine on which nothing was downloaded yet, also if --model names a local directory. A client that reads the
# list as JSON fails, and one that checks the status takes the server for ready. With an empty cache directory the same
# request has a list.
# Seen with mlx-lm 0.32.2, mlx 0.32.4 and huggingface_hub 2.4.0. It fails if the behaviour changes.
set -euo pipefail

folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || kill "$server"; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    mlx-lm==0.32.2 "mlx[cpu]==0.32.4" huggingface_hub==2.4.0

port=$("$folder/venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
HF_HUB_CACHE="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/mlx_lm.server" --port "$port" >"$folder/log" 2>&1 &
server=$!

"$folder/venv/bin/python" - "$port" "$folder/hub" <<'PY'
import json
import pathlib
import sys
import time
import urllib.error
import urllib.request

url, cache = f"http://127.0.0.1:{sys.argv[1]}", pathlib.Path(sys.argv[2])


def get(path: str) -> tuple[int, bytes]:
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        return answer.status, answer.read()


for _ in range(600):
    try:
        get("/health")
        break
    except urllib.error.URLError:
        time.sleep(0.2)

without = get("/v1/models")
cache.mkdir()
status, body = get("/v1/models")
print("without the directory:", *without, "with it:", status, body.decode())
assert without == (200, b""), "the answer without a cache directory has changed"
assert status == 200 and json.loads(body)["object"] == "list"
PY
