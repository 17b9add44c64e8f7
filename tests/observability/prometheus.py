"""A real Prometheus, which scrapes jobs every two seconds and evaluates rules."""

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.observability.browser import program
from tests.waiting import until

Labels = frozenset[tuple[str, str]]

_ADDRESS = re.compile(r'msg="Listening on" address=(\S+)')


@dataclass
class Prometheus:
    """Where it listens."""

    url: str

    def ask(self, promql: str) -> dict[Labels, float]:
        """The answer to a query now, by labels."""
        question = urllib.parse.urlencode({"query": promql})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{question}", timeout=60) as reply:
            result = json.loads(reply.read())["data"]["result"]
        return {
            frozenset(
                (k, v) for k, v in one["metric"].items() if k not in ("__name__", "instance")
            ): float(one["value"][1])
            for one in result
        }

    def alerts(self) -> dict[str, list[dict[str, str]]]:
        """The labels of the alerts that fire, by name."""
        by_alert: dict[str, list[dict[str, str]]] = {}
        for labels in map(dict, self.ask('ALERTS{alertstate="firing"}')):
            by_alert.setdefault(labels["alertname"], []).append(labels)
        return by_alert

    def is_ready(self) -> bool:
        """Whether it answers."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"{self.url}/-/ready", timeout=60),
        ):
            return True
        return False


@contextlib.contextmanager
def scraping(folder: Path, rules: Path, *jobs: str) -> Iterator[Prometheus]:
    """A Prometheus that finds jobs by the /sd of their ports.

    Args:
        folder: For its files.
        rules: File with alerts.
        jobs: URLs of the ports.
    """
    configuration = {
        "global": {"scrape_interval": "2s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "psfleet",
                "honor_labels": True,
                "http_sd_configs": [{"url": f"{job}sd", "refresh_interval": "1s"} for job in jobs],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(configuration))
    said = folder / "said"
    with open(said, "w") as log:
        process = subprocess.Popen(
            [
                program("prometheus", "prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=log,
            stderr=log,
        )

    def address() -> str:
        if process.poll() is not None:
            pytest.skip(f"Prometheus does not start: {said.read_text()[-500:]}")
        match = _ADDRESS.search(said.read_text())
        return match[1] if match else ""

    try:
        until(address, "Prometheus")
        prometheus = Prometheus(f"http://{address()}")
        until(prometheus.is_ready, "Prometheus that is ready")
        yield prometheus
    finally:
        process.terminate()
        process.wait(60)
