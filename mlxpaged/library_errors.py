"""Makes what a library says of a failure fit for clients. Native libraries write backtraces and paths into it."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)

MAX_REASON = 400
"""Characters. An error of the API has 500."""

BACKTRACE = re.compile(r"<backtrace>|stack backtrace:|Traceback \(most recent call last\)|\n\s*0: |\n\s*#0\s")
"""Where a backtrace of Rust, Python or C++ begins."""

SUFFIXES = "rs|py|pyx|c|cc|cpp|cxx|h|hpp|m|mm|metal|so|dylib"
FOLDERS = "home|Users|root|usr|opt|private|tmp|var|build|rustc|github|__w|nix|Library|Applications|Volumes|System"
PATH = re.compile(
    rf"""(?:[A-Za-z]:)?[^\s'"`()<>,;:]*[^\s'"`()<>,;:/\\]\.(?:{SUFFIXES})\b(?::\d+){{0,2}}"""  # of a library's source
    rf"""|/(?:{FOLDERS})/[^\s'"`()<>,;:]*"""
    rf"""|[A-Za-z]:\\[^\s'"`()<>,;:]*"""
)


def public_reason(error: object) -> str:
    """Returns the message of a library's error in one line, without its backtrace and without paths. The log gets the
    backtrace alone, because the message may have text of the client."""
    text = str(error)
    if (begin := BACKTRACE.search(text)) is not None:
        logger.warning("a library failed: %s", text[begin.start() :])
        text = text[: begin.start()]
    line = " ".join(PATH.sub("...", text).split()) or type(error).__name__
    return line if len(line) <= MAX_REASON else f"{line[:MAX_REASON]}..."
