"""Each library, in an environment of its own, holds a conversation with the server: programs/NAME.py or NAME.mjs.

A program prints lines `LABEL: ANSWER`. The last word of the label says which answer is expected."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.clients.conftest import installed, run
from tests.support import RunningServer

pytestmark = pytest.mark.clients

PROGRAMS = Path(__file__).parent / "programs"

EXPECTED = {
    "models": "scripted",
    "chat": "Hello there.",
    "stream": "Hello there.",
    "call": "weather Rome",
    "tool": "It is 21 degrees in Rome.",
    "object": {"city": "Rome", "degrees": 21},
}


@pytest.mark.parametrize("script", sorted(path.name for path in PROGRAMS.glob("*.*")))
def test_a_library_holds_its_conversations(any_server: RunningServer, tmp_path: Path, script: str) -> None:
    folder = installed(Path(script).stem)
    if script.endswith(".mjs"):  # Node looks for packages beside the script
        command = ["node", shutil.copy(PROGRAMS / script, folder)]
    else:  # isolated, because a script may have the name of its package
        command = [folder / "bin" / "python", "-I", PROGRAMS / script]
    shown = run(tmp_path, *command, any_server.url)
    answers = re.findall(rf"^((?:\w+ )*({'|'.join(EXPECTED)})): (.*)$", shown, flags=re.MULTILINE)
    assert answers, shown
    for label, kind, answer in answers:
        if label.startswith("completions"):  # the text as it is, which begins with the channel's name in gpt-oss
            assert answer.endswith(str(EXPECTED[kind])), label
            continue
        assert (json.loads(answer) if kind == "object" else answer) == EXPECTED[kind], label
