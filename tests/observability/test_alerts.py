"""Each alert fires when its condition holds for as long as it says, judged by Prometheus' own evaluation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from psfleet.observability.panels import PANELS
from tests.programs import ended

RULES = Path(__file__).resolve().parents[2] / "docs" / "alerts.yml"
RANK_0, RANK_1 = 'rank="0",role="server"', 'rank="1",role="server"'

Series = dict[str, tuple[str, str]]
"""By metric with labels its values, every 15 s, in a job in trouble and in a healthy one."""

CONDITIONS: dict[str, tuple[Series, dict[str, str]]] = {
    "PsfleetNoProgress": (
        {f"psfleet_pushes_total|{RANK_0}": ("700x80", "0+1x80")},
        {"rank": "0", "role": "server"},
    ),
    "PsfleetCallsNearLimit": (
        {
            f"psfleet_waiting_calls|{RANK_0}": ("91x80", "90x80"),
            f"psfleet_waiting_calls_limit|{RANK_0}": ("100x80", "100x80"),
        },
        {"rank": "0", "role": "server"},
    ),
    "PsfleetMemoryShort": (
        {
            f"psfleet_memory_used_bytes|{RANK_1}": ("95e6x80", "80e6x80"),
            f"psfleet_memory_limit_bytes|{RANK_1}": ("100e6x80", "100e6x80"),
        },
        {"rank": "1", "role": "server"},
    ),
    "PsfleetSkewedServers": (
        {
            f"psfleet_received_bytes_total|{RANK_0}": ("0+8000x80", "0+5000x80"),
            f"psfleet_received_bytes_total|{RANK_1}": ("0+2000x80", "0+5000x80"),
        },
        {},
    ),
    "PsfleetNonFinite": (
        {'psfleet_nonfinite_pushes_total|rank="3",role="worker"': ("0x40 1x40", "0x80")},
        {"rank": "3", "role": "worker"},
    ),
    "PsfleetProcessDied": (
        {f"psfleet_deaths_total|{RANK_1}": ("0x40 1x40", "0x80")},
        {"rank": "1", "role": "server"},
    ),
    "PsfleetManyRetries": (
        {'psfleet_retries_total|rank="0",role="worker"': ("0+30x80", "0+10x80")},
        {"rank": "0", "role": "worker"},
    ),
    "PsfleetSnapshotOverdue": (
        {
            f"psfleet_snapshot_wait_seconds|{RANK_0}": ("190x80", "170x80"),
            f"psfleet_snapshot_interval_seconds|{RANK_0}": ("60x80", "60x80"),
        },
        {},
    ),
    "PsfleetStandbyMissing": (
        {f"psfleet_standby_ready|{RANK_1}": ("1x8 0x72", "1x80")},
        {"rank": "1", "role": "server"},
    ),
    "PsfleetStandbyBehind": (
        {f"psfleet_standby_queued_bytes|{RANK_0}": ("80e6x80", "60e6x80")},
        {"rank": "0", "role": "server"},
    ),
}


def test_every_alert_has_a_condition() -> None:
    """None of the table of panels is left out here."""
    assert {panel.alert.name for panel in PANELS if panel.alert} == CONDITIONS.keys()


def case(name: str) -> dict[str, Any]:
    """What promtool is to find: the alert of the job in trouble after its time, and nothing before."""
    series, labels = CONDITIONS[name]
    [severity] = [
        panel.alert.severity for panel in PANELS if panel.alert and panel.alert.name == name
    ]
    kept = {"alertname": name, "alertstate": "firing", "job": "bad", "severity": severity}
    said = ",".join(f'{key}="{value}"' for key, value in (kept | labels).items())
    asked = {"expr": f'ALERTS{{alertname="{name}",alertstate="firing"}}'}
    firing = [{"labels": f"ALERTS{{{said}}}", "value": 1}]
    return {
        "interval": "15s",
        "input_series": [
            {"series": f'{metric}{{job="{job}",{told}}}', "values": values}
            for key, both in series.items()
            for metric, told in [key.split("|")]
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
    done = ended([promtool, "test", "rules", str(tmp_path / "tests.yml")])
    assert done.returncode == 0, done.stdout + done.stderr
