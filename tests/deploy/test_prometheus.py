"""deploy/ against a real Prometheus, which scrapes two servers: one without keys, and one with keys."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxpaged.api.config import HttpConfig
from mlxpaged.engine_config import EngineConfig
from tests.api.helpers import ask, post, raw, run_on, write_keys
from tests.support import RunningServer, running_server, wait_until

pytestmark = pytest.mark.deploy

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "mlxpaged.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
SELECTOR = re.compile(r"(?:mlxpaged_\w+|\bup)(?:\{[^}]*\})?")
RARE = re.compile(r"mlxpaged_requests_refused_total\{code")
"""These series begin with the first such refusal."""


def program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None, f"install Prometheus, for {name} (Debian and Ubuntu: apt install prometheus)"
    return path


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **params: str) -> Any:
        body = httpx.get(f"{self.url}/api/v1/{path}", params=params).json()
        assert body["status"] == "success", body
        assert not body.get("warnings"), body
        return body["data"]

    def query(self, expression: str) -> list[float]:
        return [float(each["value"][1]) for each in self.get("query", query=expression)["result"]]

    @property
    def targets(self) -> list[Any]:
        found: list[Any] = self.get("targets")["activeTargets"]
        return found


def port_of(server: RunningServer) -> str:
    return server.url.rpartition(":")[2]


def example_config(folder: Path, open_server: RunningServer, server_with_keys: RunningServer) -> Path:
    """deploy/prometheus/prometheus.yml with both jobs, scraping the servers each second."""
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    head, job, commented = text.partition("  # - job_name: mlxpaged-with-keys\n")
    text = head + (job + commented).replace("  # ", "  ")
    changes = {
        "127.0.0.1:8080": f"127.0.0.1:{port_of(open_server)}",
        "127.0.0.1:8081": f"127.0.0.1:{port_of(server_with_keys)}",
        "interval: 15s": "interval: 1s",
    }
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    path = folder / "prometheus.yml"
    path.write_text(text)
    return path


@contextlib.contextmanager
def running_prometheus(config: Path) -> Iterator[Prometheus]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    log = (config.parent / "log").open("w")
    process = subprocess.Popen(
        [
            program("prometheus"),
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address={address}",
        ],
        stderr=log,
    )
    try:
        with log:
            prometheus = Prometheus(f"http://{address}")
            wait_until(lambda: is_ready(prometheus.url) or process.poll() is not None, 30, 0.1)
            assert process.poll() is None, (config.parent / "log").read_text()
            yield prometheus
    finally:
        process.terminate()
        process.wait(30)


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/-/ready").status_code == 200
    return False


def wait_for_scrapes(prometheus: Prometheus, count: int) -> None:
    """Until both targets were scraped `count` more times."""
    seen: dict[str, set[str]] = {}

    def scraped() -> bool:
        for target in prometheus.targets:
            seen.setdefault(target["scrapeUrl"], set()).add(target["lastScrape"])
        return len(seen) == 2 and all(len(times) > count for times in seen.values())

    wait_until(scraped, 30, 0.2)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has scraped both servers before and after a few requests."""
    folder = tmp_path_factory.mktemp("prometheus")
    keys = write_keys(folder / "keys.json", prometheus={})
    (folder / "mlxpaged.key").write_text(keys["prometheus"] + "\n")
    config = EngineConfig(kv_cache_bytes=16_000_000)
    http = HttpConfig(api_keys=folder / "keys.json")
    with (
        running_server(config) as server,
        running_server(config, http=http) as server_with_keys,
        running_prometheus(example_config(folder, server, server_with_keys)) as prometheus,
    ):
        wait_for_scrapes(prometheus, 2)
        post(server, ask("What is 17 + 25?"))
        for _ in range(2):
            post(server, run_on("What is 17 + 25?" * 10, 20))
        with raw(server) as client:
            assert client.post("/v1/completions", json={}).status_code == 400
        wait_for_scrapes(prometheus, 2)
        yield prometheus


def test_both_servers_are_scraped(prometheus: Prometheus) -> None:
    assert {(each["labels"]["job"], each["health"], each["lastError"]) for each in prometheus.targets} == {
        ("mlxpaged", "up", ""),
        ("mlxpaged-with-keys", "up", ""),
    }


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_of_the_dashboard_has_values(prometheus: Prometheus, expression: str) -> None:
    for name, value in {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*"}.items():
        expression = expression.replace(name, value)
    values = prometheus.query(expression)
    assert any(math.isfinite(value) for value in values), values


def test_the_variables_of_the_dashboard_have_the_servers_and_the_models(prometheus: Prometheus) -> None:
    found = {}
    for variable in DASHBOARD["templating"]["list"][1:]:
        call = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert call is not None
        selector = call[1].replace("$instance", ".*")
        found[variable["name"]] = prometheus.get(f"label/{call[2]}/values", **{"match[]": selector})
    assert found["model"] == ["demo"]
    assert sorted(found["instance"]) == sorted(each["labels"]["instance"] for each in prometheus.targets)


def test_the_alerts_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    assert {(rule["name"], rule["health"], rule["state"]) for rule in group["rules"]} == {
        (rule["name"], "ok", "inactive") for rule in group["rules"]
    }
    selectors = {selector for rule in group["rules"] for selector in SELECTOR.findall(rule["query"])}
    assert len(selectors) > 10
    missing = [each for each in selectors if not RARE.match(each) and not prometheus.query(each)]
    assert not missing


def test_alerts_say_how_urgent_they_are_and_what_to_do(prometheus: Prometheus) -> None:
    (group,) = prometheus.get("rules")["groups"]
    for rule in group["rules"]:
        assert rule["duration"] > 0, rule["name"]
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["name"]
        assert rule["annotations"].keys() == {"summary", "description"}, rule["name"]


def test_each_alert_fires_when_it_should_and_only_then() -> None:
    folder = DEPLOY / "prometheus"
    subprocess.run([program("promtool"), "check", "rules", "alerts.yml"], cwd=folder, check=True)
    subprocess.run([program("promtool"), "test", "rules", "alerts_test.yml"], cwd=folder, check=True)
    alerts = re.findall(r"alert: (\w+)", (folder / "alerts.yml").read_text())
    tested = (folder / "alerts_test.yml").read_text()
    assert [name for name in alerts if name not in tested] == []
