"""The documentation names what there is: flags, endpoints, metrics, files. Nothing is missing, nothing is invented."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpaged.cli import main, make_parser
from mlxpaged.engine_config import EngineConfig
from mlxpaged.models.files.architectures import known_source
from mlxpaged.models.sources.short_names import short_names
from tests.api.helpers import raw
from tests.support import RunningServer, running_server

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
COMMANDS = (
    *("serve", "chat", "run", "ps", "top", "stop", "launch", "service install", "bench", "doctor"),
    *("keys add", "keys list", "keys remove", "pull", "ls", "rm", "cache ls", "cache clear", "config", "completion"),
)
OF_OTHERS = {
    *("--add-host", "--backend", "--before", "--budget", "--continuous-batching", "--ctx-size", "--model"),
    *("--openai-api-base", "--temp"),
}
"""Flags of Docker, of clients, of other servers and of benchmarks/compare.py, and the other form of MODEL."""


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The model of the README's first command."""
    config = EngineConfig(kv_cache_bytes=16_000_000)
    with running_server(config) as server:
        yield server


def section(page: str, heading: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    level = len(heading) - len(heading.lstrip("#"))
    _, _, rest = (DOCS / page).read_text().partition(f"\n{heading}\n")
    assert rest, f"{page} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def names_in_table(page: str, heading: str) -> list[str]:
    """The first cells of the rows, if they are spans of code."""
    return re.findall(r"^\| `([^`]+)` \|", section(page, heading), flags=re.MULTILINE)


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_of_flags_has_exactly_the_flags_of_a_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = re.findall(r"^  (--[\w-]+)", help_of(command, capsys), flags=re.MULTILINE)
    flags = [flag for flag in flags if flag != "--model"]  # in the row of MODEL
    page = next(
        page
        for page in ("configuration.md", "commands.md")
        if f"\n## mlxpaged {command}\n" in (DOCS / page).read_text()
    )
    documented = [name for name in names_in_table(page, f"## mlxpaged {command}") if name[0] == "-"]
    assert sorted(documented) == sorted(flags)


def test_flags_in_the_text_exist(capsys: pytest.CaptureFixture[str]) -> None:
    known = {flag for command in ("", *COMMANDS) for flag in re.findall(r"--[\w-]+", help_of(command, capsys))}
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text()
        commands = "\n".join(re.findall(r"^mlxpaged .+$", text, flags=re.MULTILINE))
        named = set(re.findall(r"`(--[a-z][\w-]*)", text)) | set(re.findall(r" (--[\w-]+)", commands))
        assert named - known - OF_OTHERS == set(), page.name


def test_the_parser_takes_the_commands_of_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schema.json").write_text("{}")
    shutil.copy(DOCS / "images" / "chat-phone.png", tmp_path / "photo.png")
    monkeypatch.chdir(tmp_path)
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^mlxpaged (.+)$", text, flags=re.MULTILINE):
            words = shlex.split(line.partition(" | ")[0], comments=True)
            make_parser([words[0]]).parse_args(words)


def test_the_table_of_endpoints_is_that_of_the_server(server: RunningServer) -> None:
    with raw(server) as client:
        paths = client.get("/openapi.json").json()["paths"]
    served = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    assert sorted(names_in_table("api.md", "## Endpoints")) == sorted(served)


def metric_names(server: RunningServer) -> list[str]:
    with raw(server) as client:
        shown = client.get("/metrics").text
    names = re.findall(r"^# TYPE (mlxpaged_\w+) (?:counter|gauge|histogram)$", shown, flags=re.MULTILINE)
    return [name for name in names if not name.endswith("_created")]


def test_the_table_of_metrics_is_that_of_the_server(server: RunningServer) -> None:
    assert sorted(names_in_table("operations.md", "## Metrics")) == sorted(metric_names(server))


@pytest.mark.parametrize("path", ["grafana/mlxpaged.json", "prometheus/alerts.yml", "prometheus/alerts_test.yml"])
def test_metrics_of_the_dashboard_and_the_alerts_exist(server: RunningServer, path: str) -> None:
    used = re.findall(r"\b(mlxpaged_\w+?)(?:_bucket)?\b", (ROOT / "deploy" / path).read_text())
    assert used
    assert set(used) - set(metric_names(server)) == set()


@pytest.mark.parametrize(
    "path", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
)
def test_links_to_files_lead_somewhere(path: str) -> None:
    """`make docs` checks the links of the site."""
    page = ROOT / path
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_readme_is_short_and_begins_with_the_status() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert any("has run on a Mac" in line for line in lines[:15])


def test_the_examples_of_the_readme_are_answered(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "README.md").read_text().replace("http://127.0.0.1:8080", server.url)
    body = re.search(r"-d '(.+)'", text)
    example = re.search(r"```python\n(.+?)```", text, flags=re.DOTALL)
    assert body is not None
    assert example is not None
    with raw(server) as client:
        answer = client.post("/v1/chat/completions", json=json.loads(body[1])).json()
    assert answer["choices"][0]["message"]["content"]
    exec(example[1], {})
    assert capsys.readouterr().out


def test_the_table_of_short_names_is_that_of_the_program() -> None:
    pattern = r"^\| `([^`]+)` \| ([\w, ]+) \| ([\w-]+) \| (.+) \|$"
    rows = re.findall(pattern, section("commands.md", "## Short names"), flags=re.MULTILINE)
    sizes = {f"{row[0]}:{size}": gb for row in rows for size, gb in re.findall(r"`([^`]+)` ([\d.]+)", row[3])}
    assert sizes == {name: f"{row.bytes / 1e9:.1f}" for name, row in short_names().items()}
    for family, kinds, source, _ in rows:
        found = [row for name, row in short_names().items() if name.startswith(f"{family}:")]
        assert set(kinds.split(", ")) == {row.kind.value for row in found}, family
        assert {source} == {known_source({"model_type": row.model_type}) for row in found}, family


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == [str(page.relative_to(DOCS)) for page in PAGES]


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_the_tests_of_the_reliability_page_exist_and_have_the_names_of_their_threads() -> None:
    rows = re.findall(
        r"^\| \[([\w.-]+) #(\d+)\]\(https://github\.com/[\w./-]+/(\d+)\) .*\| `(tests/[\w/]+\.py)::(test_\w+)` \|$",
        section("reliability.md", "## Faults of other servers"),
        flags=re.MULTILINE,
    )
    assert len({(peer, number) for peer, number, *_ in rows}) >= 20
    for peer, number, linked, path, name in rows:
        assert linked == number
        assert name in functions_of(ROOT / path), f"{path} has no {name}"
        if path.startswith("tests/reliability/"):
            assert name.startswith(f"test_{peer.replace('-', '_')}_{number}_")
    tests = {name for name in functions_of(ROOT / "tests/reliability/test_peers_threads.py") if name[:5] == "test_"}
    assert tests - {name for *_, name in rows} == set(), "each test has a row"


def test_files_that_the_architecture_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text().replace("cli/NAME.py", "")
    named = set(re.findall(r"`((?:api|attention|cache|cli|cpu|engine|models|scheduler)/[\w/]+\.py)`", text))
    assert named
    assert {path for path in named if not (ROOT / "mlxpaged" / path).exists()} == set()


def test_modules_and_tests_of_the_budgets_exist() -> None:
    tables = section("security.md", "## Budgets") + section("security.md", "## Native code")
    rows = re.findall(r"^\| (?!Budget|Library|---).*\|$", tables, flags=re.MULTILINE)
    assert len(rows) > 30
    for row in rows:
        *_, modules, test = row.strip("| ").split(" | ")
        for module in modules.split(", "):
            assert (ROOT / "mlxpaged" / module.strip("`")).is_file(), module
        path, _, name = test.strip("`").partition("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), test
