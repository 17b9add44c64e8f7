"""Each alert fires when its condition holds for as long as it says, judged by Prometheus' own evaluation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.panels.process_panels import PANELS
from tests.programs import ended

RULES = Path(__file__).resolve().parents[2] / "docs" / "alerts.yml"

TABLE = """
PsfleetNoProgress; server 0; pushes_total, server 0, 700x80, 0+1x80
PsfleetCallsNearLimit; server 0; waiting_calls, server 0, 91x80, 90x80; \
waiting_calls_limit, server 0, 100x80, 100x80
PsfleetMemoryShort; server 1; memory_used_bytes, server 1, 95e6x80, 80e6x80; \
memory_limit_bytes, server 1, 100e6x80, 100e6x80
PsfleetSkewedServers; ; received_bytes_total, server 0, 0+8000x80, 0+5000x80; \
received_bytes_total, server 1, 0+2000x80, 0+5000x80
PsfleetNonFinite; worker 3; nonfinite_pushes_total, worker 3, 0x40 1x40, 0x80
PsfleetProcessDied; server 1; deaths_total, server 1, 0x40 1x40, 0x80
PsfleetManyRetries; worker 0; retries_total, worker 0, 0+30x80, 0+10x80
PsfleetSnapshotOverdue; ; snapshot_wait_seconds, server 0, 190x80, 170x80; \
snapshot_interval_seconds, server 0, 60x80, 60x80
PsfleetStandbyMissing; server 1; standby_ready, server 1, 1x8 0x72, 1x80
PsfleetStandbyBehind; server 0; standby_queued_bytes, server 0, 80e6x80, 60e6x80"""
"""An alert, of whom it is, and metrics with values every 15 s, in a job in trouble and in a healthy one."""
CONDITIONS = {line.split("; ")[0]: line.split("; ")[1:] for line in TABLE.strip().splitlines()}


def seat(text: str) -> dict[str, str]:
    """The labels of a process."""
    role, _, rank = text.partition(" ")
    return {"rank": rank, "role": role} if rank else {}


def labelled(**labels: str) -> str:
    """The labels as PromQL has them."""
    return ",".join(f'{key}="{value}"' for key, value in labels.items())


def test_every_alert_has_a_condition() -> None:
    """None of the table of panels is left out here."""
    assert {panel.alert.name for panel in PANELS if panel.alert} == CONDITIONS.keys()


def case(name: str) -> dict[str, Any]:
    """What promtool is to find: the alert of the job in trouble after its time, and nothing before."""
    whose, *series = CONDITIONS[name]
    [severity] = [one.alert.severity for one in PANELS if one.alert and one.alert.name == name]
    kept = {"alertname": name, "alertstate": "firing", "job": "bad", "severity": severity}
    said = labelled(**kept, **seat(whose))
    asked = {"expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}'}
    firing = [{"labels": f"ALERTS{{{said}}}", "value": 1}]
    return {
        "interval": "15s",
        "input_series": [
            {"series": f"psfleet_{metric}{{{labelled(job=job, **seat(of))}}}", "values": values}
            for metric, of, *both in (one.split(", ") for one in series)
            for job, values in zip(("bad", "good"), both, strict=True)
        ],
        "promql_expr_test": [
            {**asked, "eval_time": "0m", "exp_samples": []},
            {**asked, "eval_time": "15m", "exp_samples": firing},
        ],
    }


def test_alerts_fire(tmp_path: Path) -> None:
    """In the job in trouble each fires, and in the healthy one beside it none does."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    checked = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [case(name) for name in CONDITIONS],
    }
    (tmp_path / "tests.yml").write_text(json.dumps(checked))
    process = ended([promtool, "test", "rules", str(tmp_path / "tests.yml")])
    assert process.returncode == 0, process.stdout + process.stderr
