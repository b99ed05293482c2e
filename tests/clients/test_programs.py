"""Each library, in an environment of its own, holds a conversation with the server: programs/NAME.py or NAME.mjs, which
older versions, NAME_VERSION, run too.

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


SCRIPTS = {path.stem: path.name for path in sorted(PROGRAMS.glob("*.*"))}
SCRIPTS |= {"vercel_ai_6": SCRIPTS["vercel_ai"]}


@pytest.mark.parametrize("library", SCRIPTS)
def test_a_library_holds_its_conversations(any_server: RunningServer, tmp_path: Path, library: str) -> None:
    folder, script = installed(library), SCRIPTS[library]
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
