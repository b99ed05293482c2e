"""`serve --prefix-cache-dir` and `mlxpaged cache`: prefixes that outlive a server, and a kill."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from mlxpaged.parts.disk.disk_index import Name
from mlxpaged.parts.disk.disk_records import StoredBlock
from mlxpaged.parts.disk.disk_store import DiskStore
from tests.cli.helpers import DEADLINE, Result, serving

TEXT = "What is 17 + 25? " * 12


def answer(url: str) -> tuple[str, int]:
    """The text, and the tokens of the prompt that were not computed."""
    body = {"messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 8}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=DEADLINE, trust_env=False).json()
    cached = found["usage"].get("prompt_tokens_details") or {"cached_tokens": 0}
    return found["choices"][0]["message"]["content"], cached["cached_tokens"]


def on_disk(url: str) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{url}/v1/status", trust_env=False).json()["prefix_cache_disk"]
    return found


def test_a_restarted_server_reads_the_prefix_and_the_command_shows_and_deletes_it(
    tmp_path: Path, run: Callable[..., Result]
) -> None:
    directory = tmp_path / "prefixes"
    flags = ["demo", "--prefix-cache-dir", str(directory), "--prefix-cache-disk", "10MB"]
    with serving(tmp_path / "one", *flags) as command:
        assert re.search(rf"on disk +0.0 MB of prefixes in {directory}, up to 10.0 MB\n", command.stdout)
        text, _ = answer(command.url)
        again, cached = answer(command.url)
        assert again == text
        assert cached > 0
        in_use = re.escape(f"another server uses {directory} (process ") + r"\d+\)"
        with serving(tmp_path / "two", *flags) as other:
            assert re.search(f"no prefixes: {in_use}", other.stdout)
            assert answer(other.url)[0] == text
        assert re.fullmatch(f"mlxpaged: {in_use}\n", run("cache", "ls", str(directory)).stderr)
        command.process.send_signal(signal.SIGTERM)
        assert command.wait_end() == 0
    with serving(tmp_path / "three", *flags) as command:
        before = on_disk(command.url)
        assert (before["blocks"] > 0, before["max_bytes"]) == (True, 10_000_000)
        assert answer(command.url) == (text, cached)
        assert on_disk(command.url)["loaded_blocks"] > 0
        metrics = httpx.get(f"{command.url}/metrics", trust_env=False).text
        assert re.search(r'^mlxpaged_kv_blocks_loaded_total{model="demo"} [1-9]', metrics, re.MULTILINE)
        command.process.send_signal(signal.SIGKILL)
        command.wait_end()
    listed = run("cache", "ls", str(directory))
    assert re.search(r"^demo +\d+ +[\d.]+ [KM]B$", listed.stdout, re.MULTILINE), listed
    assert "0 blocks" in run("cache", "clear", str(directory), "other").stderr
    assert re.fullmatch(rf"{before['blocks']} blocks are deleted, .*\n", run("cache", "clear", str(directory)).stderr)
    assert run("cache", "ls", str(directory)).stdout.count("\n") == 1


def test_without_the_flag_the_banner_names_it(tmp_path: Path) -> None:
    with serving(tmp_path, "demo") as command:
        assert "with --prefix-cache-dir DIR" in command.stdout
        assert on_disk(command.url)["off_because"] == "there is no --prefix-cache-dir"


def test_a_directory_without_prefixes_is_named(tmp_path: Path, run: Callable[..., Result]) -> None:
    assert run("cache", "clear", str(tmp_path)).stderr == f"mlxpaged: {tmp_path} has no prefixes\n"
    assert list(tmp_path.iterdir()) == []
    DiskStore(tmp_path, 1000, 1000).close()
    assert run("cache", "clear", str(tmp_path)).status == 0


def test_the_shares_of_several_ranks_are_shown_and_deleted_together(tmp_path: Path, run: Callable[..., Result]) -> None:
    for rank in range(2):
        store = DiskStore(tmp_path / f"rank-{rank}-of-2", 10_000, 10_000)
        store.write("m", [(StoredBlock(Name(bytes([rank]), 0), b"", (1, 2)), memoryview(bytes(100)))])
        store.close()
    assert re.search(r"^m +1 .*\nm +1 .*\n$", run("cache", "ls", str(tmp_path)).stdout, re.MULTILINE)
    assert "2 blocks are deleted" in run("cache", "clear", str(tmp_path), "m").stderr
