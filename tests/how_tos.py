"""The changes of docs/afternoon.md, as they are made. test_how_tos.py makes each in a copy of the package.

python -m tests.how_tos     # writes their table into the page
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

Edit = tuple[str, str]
"""What stands in a file once, and what replaces it."""

PAGE = Path(__file__).parents[1] / "docs" / "afternoon.md"
BEGIN, END = "<!-- how-tos: begin -->\n", "<!-- how-tos: end -->\n"


@dataclass(frozen=True)
class HowTo:
    """title: as on the page. check: Python that fails if the change does not work. edits, new: by file of the
    package."""

    title: str
    check: str
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    new: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return [*self.new, *self.edits]


def after(line: str, new: str) -> Edit:
    """Puts lines after one."""
    return line, line + new


def before(line: str, new: str) -> Edit:
    """Puts lines before one."""
    return line, new + line


HOW_TOS = (
    HowTo(
        "a sampling parameter",
        """
from types import SimpleNamespace
from mlxpaged.api.generation.request import given_fields
from mlxpaged.api.openai.schema import CompletionRequest
from mlxpaged.core.engine.random_sampling import row_parameters
from mlxpaged.core.engine.sampling_params import SamplingParams

body = CompletionRequest(model="m", prompt="p", temperature=0.5, heat=4)
row = SimpleNamespace(params=SamplingParams(**given_fields(body, SamplingParams)), seed=1, position=0)
assert row_parameters([row], 100)[0, 2:3].view("float32")[0] == 2.0
""",
        {
            "api/openai/schema.py": (
                after(
                    "    min_p: Probability | None = None\n",
                    "    heat: Annotated[float, Field(gt=0, le=10)] | None = None\n",
                ),
            ),
            "core/engine/sampling_params.py": (
                after("    top_p: float = 1.0\n", "    heat: float = 1.0  # multiplies the temperature\n"),
            ),
            "core/engine/random_sampling.py": (("(p.temperature, p.min_p,", "(p.temperature * p.heat, p.min_p,"),),
        },
    ),
    HowTo(
        "an endpoint",
        """
from mlxpaged.api.endpoints import ENDPOINTS

[found] = [each for each in ENDPOINTS if each.path == "/v1/hello"]
assert found.method == "GET"
""",
        {
            "api/server_api.py": (
                before('    get("/health", status.health,', '    get("/v1/hello", hello.respond, "A greeting"),\n'),
                ("import downloadable, openapi,", "import downloadable, hello, openapi,"),
            ),
        },
        {
            "api/hello.py": """
from starlette.requests import Request
from starlette.responses import JSONResponse


async def respond(request: Request) -> JSONResponse:
    return JSONResponse({"hello": "world"})
"""
        },
    ),
    HowTo(
        "a format of tool calls",
        """
from mlxpaged.formats import FORMATS, format_of

assert format_of("{{ '<run>' }}", ()) is FORMATS["run_tags"]
""",
        {
            "addons.py": (
                before('            harmony="harmony:HARMONY",\n', '            run_tags="run_tags:RUN_TAGS",\n'),
            ),
        },
        {
            "formats/run_tags.py": """
from mlxpaged.formats.format import Format
from mlxpaged.formats.json_calls import json_calls, written_json
from mlxpaged.formats.source import Reading, Source
from mlxpaged.formats.tools import Call, Tools


def read(source: Source, tools: Tools) -> Reading[list[Call]]:
    return (yield from json_calls(source, tools, "</run>"))


RUN_TAGS = Format(
    name="run_tags",
    models="an example",
    starts=("<run>",),
    first=('{"name"',),
    ends=("</run>",),
    read=read,
    in_template=(("<run>",),),
    written=written_json("", "</run>"),
)
"""
        },
    ),
    HowTo(
        "a family that sees with a tower and prompts that are known",
        """
from mlxpaged.models.vision.loading import FAMILIES

assert FAMILIES["toy_vl"] is FAMILIES["qwen2_vl"]
""",
        {"models/vision/loading.py": (before('    "qwen2_vl": QWEN_2,\n', '    "toy_vl": QWEN_2,\n'),)},
    ),
    HowTo(
        "a quantization type of GGUF files",
        """
import mlx.core as mx
from mlxpaged.models.sources.gguf.blocks import EXACT
from mlxpaged.models.sources.gguf.file import TYPES

assert TYPES[99].name == "Q8_9"
bits, unpack = EXACT["Q8_9"]
assert unpack(mx.zeros((1, 1, 34), mx.uint8)).q.shape == (1, 1, 32)
""",
        {
            "models/sources/gguf/file.py": (
                after('    8: BlockType("Q8_0", 32, 34),\n', '    99: BlockType("Q8_9", 32, 34),\n'),
            ),
            "models/sources/gguf/blocks.py": (after('    "Q8_0": (8, q8_0),\n', '    "Q8_9": (8, q8_0),\n'),),
        },
    ),
    HowTo(
        "keys and values in another number of bits",
        """
from mlxpaged.attention.quantization import quantization_of
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.checks.quantized_kv import COARSER

assert quantization_of(EngineConfig(kv_cache_dtype="int6").kv_cache_dtype, 64, 64).value_bits == 6
assert COARSER["int6"] == "int8"
""",
        {
            "engine_config.py": (('("auto", "int8", "int4")', '("auto", "int8", "int6", "int4")'),),
            "attention/quantization.py": (
                ('{"int8": 8, "int4": 4}', '{"int8": 8, "int6": 6, "int4": 4}'),
                ("KEY_GROUPS = {8: (64, 32),", "KEY_GROUPS = {8: (64, 32), 6: (64, 32),"),
            ),
            "models/checks/quantized_kv.py": (('{"int4": "int8",', '{"int4": "int6", "int6": "int8",'),),
        },
    ),
    HowTo(
        "another order of waiting requests",
        """
from mlxpaged.core.scheduling.queue import turn_of
from mlxpaged.core.scheduling.sequence import Sequence

sequence = Sequence(0, [1], 1, arrival_time=3.0)
sequence.adapter = "red"
assert turn_of(sequence, 1) == 4.0
""",
        {
            "core/scheduling/queue.py": (
                (
                    "    return sequence.arrival_time + min(MOST_SECONDS,",
                    "    own = 1.0 if sequence.adapter else 0.0\n"
                    "    return sequence.arrival_time + own + min(MOST_SECONDS,",
                ),
            )
        },
    ),
    HowTo(
        "a metric of what is counted",
        """
from mlxpaged.api.metrics import GAUGES

[read] = [read for name, _, read in GAUGES if name == "hello"]
""",
        {
            "api/metrics.py": (
                before(
                    '    ("max_kv_blocks",', '    ("hello", "An example", lambda stats: stats.model_calls_total),\n'
                ),
            )
        },
    ),
    HowTo(
        "a flag of the engine",
        """
import contextlib
import io
import os
from mlxpaged.cli import main

os.environ["MLXPAGED_PATIENCE"] = "7"
with contextlib.redirect_stdout(io.StringIO()) as shown:
    main(["config"])
assert "patience = 7" in shown.getvalue()
""",
        {
            "engine_config.py": (before("    cpu_dtype: str", "    patience: int = 1  # seconds\n"),),
            "cli/engine_flags.py": (
                before(
                    '    steps.switch("--no-batching"',
                    '    steps.field("--patience", flags.positive_int, "an example, in seconds")\n',
                ),
            ),
        },
    ),
    HowTo(
        "an error of the engine with a status and a code of its own",
        """
from mlxpaged.api.errors import ENGINE_ERRORS
from mlxpaged.core.engine.errors import TooTiredError

assert ENGINE_ERRORS[TooTiredError][0] == 503
""",
        {
            "core/engine/errors.py": (
                before(
                    "class EngineBusyError(",
                    'class TooTiredError(Exception):\n    """It is late."""\n\n\n',
                ),
            ),
            "api/errors.py": (
                after(
                    "ENGINE_ERRORS: dict[type[Exception], tuple[int, str, str, dict[str, str] | None]] = {\n",
                    '    engine_errors.TooTiredError: (503, "server_error", "too_tired", RETRY),\n',
                ),
            ),
        },
    ),
    HowTo(
        "an optional part of the engine",
        """
from mlxpaged.engine.builder import build_engine
from mlxpaged.engine_config import EngineConfig
from mlxpaged.core.engine.model_runner import ModelRunner
from mlxpaged.core.engine.request import Request
from mlxpaged.core.engine.sampling_params import SamplingParams
from mlxpaged.models.loader import load_model

for drafts, overlaps in (("off", False), ("ngram", False), ("off", True), ("ngram", True)):
    ModelRunner.overlaps = overlaps
    config = EngineConfig("demo", kv_cache_bytes=4_000_000, speculative=drafts)
    core = build_engine(config, load_model("demo"))
    params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias={30: 100.0}, temperature=0.0)
    core.add(Request("a", [5, 6, 7], params, 0.0))
    outputs = []
    while core.has_work():
        outputs += core.step()
    assert outputs[-1].num_output_tokens < 60, "the loop was not ended"
    assert (outputs[-1].finish_reason.value, outputs[-1].stop_cause) == ("stop", "one token")
    assert sum(len(output.token_ids) for output in outputs) == outputs[-1].num_output_tokens, "tokens are lost"
""",
        {
            "engine/parts.py": (
                before("    yield GrowthWait(", "    yield OneToken(requests)\n"),
                before("from mlxpaged.parts.ranks.ranks", "from mlxpaged.parts.one_token import OneToken\n"),
            ),
        },
        {
            "parts/one_token.py": '''
"""Ends answers that repeat one token: an example of a part."""

from mlxpaged.core.engine.in_flight import InFlightStep
from mlxpaged.core.engine.part import Need, Part
from mlxpaged.core.engine.request_table import RequestTable

MOST = 20


class OneToken(Part):
    """It ends answers before a step: all tokens that are known have become text then."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests

    def before_step(self, in_flight: InFlightStep | None) -> Need:
        for sequence_id, running in list(self._requests.by_sequence.items()):
            sequence = running.sequence
            answer = sequence.token_ids[sequence.num_prompt_tokens : sequence.num_known_tokens]
            if len(answer) >= MOST and len(set(answer[-MOST:])) == 1:
                self._requests.outputs.append(self._requests.complete(sequence_id, "one token"))
        return Need.NOTHING
'''
        },
    ),
)


def table() -> str:
    """The table of the page."""
    lines = ["| To add | open |", "|---|---|"]
    for each in HOW_TOS:
        made = [f"`{name}` (new)" for name in each.new]
        lines.append(f"| {each.title} | {', '.join([*made, *(f'`{name}`' for name in each.edits)])} |")
    return "\n".join([*lines, ""])


def written(page: str) -> str:
    """The page with the table of today."""
    first, rest = page.split(BEGIN)
    return first + BEGIN + "\n" + table() + "\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
