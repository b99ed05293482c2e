"""The cases against one server: a table of how many pass for each API, and the failed ones with what was seen.

    python -m benchmarks.conformance http://127.0.0.1:8080 --model NAME

The exit status is 1 if a case fails. Endpoints that the server does not have are counted apart.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import anthropic, ollama, openai, responses  # noqa: F401  (they fill CASES)
from .case import CASES, Outcome, run
from .target import DEFINES, ENDPOINTS, NotReady, Target, Wrong


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def report(outcomes: Sequence[Outcome]) -> str:
    by_endpoint: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_endpoint.setdefault(outcome.case.endpoint, []).append(outcome)
    shown = [(ENDPOINTS[name], found) for name, found in by_endpoint.items()]
    rows = [[each.api, f"`{each.path}`", *counts(found)] for api in DEFINES for each, found in shown if each.api == api]
    rows.append(["all", "", *counts(outcomes)])
    failed = [[f"`{each.case.id}`", each.case.defined_by, each.seen] for each in outcomes if each.seen is not None]
    text = table(("API", "endpoint", "passed", "not offered"), rows)
    return f"{text}\n\n{table(('failed', 'what defines it', 'seen'), failed)}" if failed else text


def counts(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """Passed of offered, and not offered."""
    offered = [each for each in outcomes if each.offered]
    passed = sum(each.seen is None for each in offered)
    missing = len(outcomes) - len(offered)
    return f"{passed} of {len(offered)}" if offered else "-", str(missing or "")


def main() -> None:
    epilog = "\n".join(f"{api}: {names}" for api, names in DEFINES.items())
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.conformance", description=__doc__, epilog=epilog, formatter_class=form
    )
    parser.add_argument("url")
    parser.add_argument("--model", help="as requests name it; default: the first that /v1/models lists")
    parser.add_argument("--api", default=",".join(DEFINES), help="separated by commas; default: %(default)s")
    parser.add_argument("--cases", nargs="+", metavar="ID", help="only these")
    parser.add_argument("--context", type=int, help="most tokens of a prompt; default: as /v1/models says, or 8192")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for an answer, default 300")
    parser.add_argument("--key", default="none", help="the API key")
    args = parser.parse_args()
    if unknown := set(args.api.split(",")) - DEFINES.keys():
        parser.error(f"--api {', '.join(unknown)}: choose from {', '.join(DEFINES)}")
    target = Target(args.url.rstrip("/"), args.model or "", args.context or 0, args.timeout, args.key)
    chosen = [each for each in CASES if each.api in args.api.split(",") and each.id in (args.cases or [each.id])]
    chosen.sort(key=lambda each: each.id.endswith(".too-long"))  # a server without a limit computes that for minutes
    outcomes = []
    try:
        target.find()
        for outcome in run(target, chosen):
            outcomes.append(outcome)
            result = outcome.seen or ("passed" if outcome.offered else "not offered")
            print(f"{outcome.case.id}: {result}", file=sys.stderr)
    except (Wrong, NotReady) as error:
        sys.exit(f"{target.url}: {error}")
    print(f"{target.url}, model {target.model}, context {target.context}\n\n{report(outcomes)}")
    sys.exit(any(outcome.seen is not None for outcome in outcomes))


if __name__ == "__main__":
    main()
