"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_three_prompts_share_a_batch() -> None:
    done = subprocess.run(
        [sys.executable, "examples/three.py"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "Repeat: blue river stone -> blue river stone\n" in done.stdout
    assert "What is 17 + 25? -> 42\n" in done.stdout
    assert "Reverse: a b c -> c b a\n" in done.stdout
    assert "step 1: 3 running, blocks: 3 used, 0 cached, 13 free\n" in done.stdout
    # In which step it is alone depends on the drafts that the measured times of steps are worth.
    assert re.search(r"step \d: 1 running, blocks: 1 used", done.stdout)
    assert "up to 3 sequences at once" in done.stdout
    assert "blocks: 0 used" in done.stdout
    assert "preemptions_total=0" in done.stdout
