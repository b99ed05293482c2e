"""How far the start is: one rewritten line on a terminal, a few log lines elsewhere."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import struct
import termios

import pytest

from mlxpaged.cli.start_display import LOG_SECONDS, StartDisplay
from mlxpaged.cli.status_line import StatusLine
from mlxpaged.progress import Progress, Stage

GB = 10**9
STEPS = [
    Progress(Stage.LOADING, 0, 8 * GB),
    Progress(Stage.LOADING, 3 * GB, 8 * GB),
    Progress(Stage.LOADING, 3 * GB, 8 * GB),
    Progress(Stage.LOADING, 8 * GB, 8 * GB),
    Progress(Stage.COMPILING, 0, 30),
    Progress(Stage.COMPILING, 12, 30),
    Progress(Stage.TIMING, 2, 18),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_rewritten_and_erased_at_the_end() -> None:
    stream = Terminal()
    display = StartDisplay(stream, "listening")
    for progress in (None, *STEPS):
        display.show(progress)
    shown = stream.getvalue()
    assert "\n" not in shown
    assert [text.removesuffix("\r") for text in shown.split("\x1b[2K")] == [
        "",
        "loading 0.0 of 8.0 GB",
        "loading 3.0 of 8.0 GB",
        "loading 8.0 of 8.0 GB",
        "compiling kernels 0 of 30",
        "compiling kernels 12 of 30",
        "timing kernels 2 of 18",
    ]
    display.end()
    assert stream.getvalue() == shown + "\x1b[2K"


def test_elsewhere_each_stage_has_a_log_line_and_one_more_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    stream, now = io.StringIO(), 0.0
    display = StartDisplay(stream, "listening", lambda: now)
    for progress in STEPS[:3]:
        display.show(progress)
    now += LOG_SECONDS
    for progress in STEPS[3:]:
        display.show(progress)
    display.end()
    assert stream.getvalue() == ""
    assert caplog.messages == [
        "listening",
        "loading 0.0 of 8.0 GB",
        "loading 8.0 of 8.0 GB",
        "compiling kernels 0 of 30",
        "timing kernels 2 of 18",
    ]


def test_nothing_is_logged_of_a_start_that_fails_before_weights_are_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    display = StartDisplay(io.StringIO(), "listening", lambda: 0.0)
    for progress in (None, Progress(Stage.LOADING, 0, 0)):
        display.show(progress)
    display.end(is_loaded=False)
    assert caplog.messages == []


def test_a_download_is_logged_after_ten_seconds_and_a_start_without_progress_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    now = 0.0
    display = StartDisplay(io.StringIO(), "listening", lambda: now)
    display.show(Progress(Stage.LOADING, 0, 0))
    now += LOG_SECONDS
    display.show(Progress(Stage.LOADING, 0, 0))
    assert caplog.messages == ["listening", "loading"]
    StartDisplay(io.StringIO(), "the other is listening").end()
    assert caplog.messages[2:] == ["the other is listening"]


def test_a_stage_without_parts_is_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    """It may be the first that is seen: a small model is read before."""
    caplog.set_level(logging.INFO)
    display = StartDisplay(io.StringIO(), "listening", lambda: 0.0)
    display.show(Progress(Stage.TIMING_STEPS, 0, 0))
    assert caplog.messages == ["listening", "timing steps"]


def test_a_line_is_cut_to_the_width_of_the_terminal_and_has_no_control_characters() -> None:
    screen, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 20, 0, 0))
    with open(terminal, "w") as stream, open(screen, "rb", buffering=0) as shown:
        StatusLine(stream).show("loading\x1b]0;title\x07 /a/path\nthat/is/wider/than/the/terminal")
        assert shown.read(200) == b"\x1b[2Kloading]0;title /a/\r"
