"""The running server against its own description, with bodies that schemathesis makes up. `make test-contract`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import raw
from tests.support import make_embedding_model, running_server, with_embeddings

pytestmark = pytest.mark.contract

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def test_the_description_is_valid() -> None:
    from openapi_spec_validator import validate

    with running_server(None) as server, raw(server) as client:
        validate(client.get("/openapi.json").json())


def test_no_body_that_fits_the_description_or_not_makes_the_server_fail_or_hang(tmp_path: Path) -> None:
    """The pool is small, so that no answer is long."""
    second = make_embedding_model(tmp_path / "second")
    config = with_embeddings(EngineConfig(kv_cache_bytes=200_000), second)
    with running_server(config, data_dir=tmp_path / "data") as server:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", CHECKS, "--max-examples", "40", "--mode", "all", "--request-timeout", "30"),
            *("--generation-deterministic", "--no-color", "--exclude-path", "/v1/status/stream"),  # it has no end
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
        assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2000:]
        server.wait_idle(60)
        with raw(server) as client:
            assert client.get("/health").status_code == 200
