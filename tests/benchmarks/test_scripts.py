"""Each benchmark runs, with the smallest of sizes, and says what it measured."""

import importlib
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.programs import IN_DOCS, ended

pytestmark = IN_DOCS
ROOT = Path(__file__).resolve().parents[2]
COMMON = ["--runs", "1", "--no-peers"]


def run(script: str, *options: str, folder: Path) -> dict[str, Any]:
    """What the script writes as JSON; it must also print a table."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = ended(
        [
            sys.executable,
            str(ROOT / "benchmarks" / script),
            *COMMON,
            *options,
            "--json",
            str(folder / "figures.json"),
        ],
        env={**os.environ, "PYTHONPATH": path},
        timeout=570,
    )
    assert process.returncode == 0, process.stderr
    figures: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    assert figures["title"] in process.stdout
    assert figures["machine"]["cores"] == os.cpu_count()
    return figures


@pytest.mark.parametrize(
    ("script", "options", "lines"),
    [
        ("w1_sparse.py", ["--steps", "2", "--rows", "5000", "--workers", "1", "--batches", "2"], 4),
        ("w2_dense.py", ["--steps", "1", "--length", "5000"], 6),
        ("w3_ctr.py", ["--steps", "1", "--batches", "2"], 3),
    ],
)
def test_workloads(script: str, options: list[str], lines: int, tmp_path: Path) -> None:
    """A workload reports CPU and wall of each psfleet contender, and names who was left out."""
    figures = run(script, *options, folder=tmp_path)
    assert len(figures["rows"]) == lines
    assert all(row["servers"] > 0 and row["workers' part"] > 0 for row in figures["rows"])
    assert figures["skipped"]["torch rpc"] == "left out"
    assert {name.split(",")[0] for name in figures["skipped"]} >= {"TensorFlow", "Paddle"}


def test_pooled(tmp_path: Path) -> None:
    """Each way of psfleet is measured at each width; FBGEMM is left out."""
    small = ("--steps", "1", "--rows", "100", "--samples", "8", "--dims", "16")
    figures = run("pooled.py", *small, folder=tmp_path)
    assert [row["contender"] for row in figures["rows"]] == [
        "psfleet, embedded",
        "psfleet, 2 servers",
        "psfleet, 2 servers, TLS",
    ]
    assert all(row["CPU-s / M samples"] > 0 for row in figures["rows"])
    assert figures["skipped"] == {"FBGEMM": "left out"}


def test_growth(tmp_path: Path) -> None:
    """The pauses are ordered: the worst is no less than the median. A row's CPU and bytes follow."""
    rows = run("growth.py", "--rows", "8192", folder=tmp_path)["rows"]
    for first, worst, median in ((rows[0], rows[1], rows[4]), (rows[5], rows[6], rows[9])):
        names = [row["pause"] for row in (first, worst, median)]
        assert names == ["first", "worst", "median"]
        assert worst["ms"] >= median["ms"] > 0
    for row in rows[10:]:
        assert min(row["M rows / CPU-s"], row["pull + push"]) > 0
        assert row["bytes / row"] > 192


@pytest.mark.timeout(600)  # W1 and W3 run with each kind
def test_disk(tmp_path: Path) -> None:
    """Tables in memory and on disk, then W1 and W3 with each, in a folder that is empty afterwards."""
    small = ("--rows", "200000", "--steps", "1", "--folder", str(tmp_path / "rows"))
    (tmp_path / "rows").mkdir()
    figures = run("disk.py", *small, folder=tmp_path)
    memory, disk, *jobs = figures["rows"]
    assert (memory["table"], disk["table"], figures["skipped"]) == ("cpu", "disk", {})
    assert min(memory["M rows / CPU-s"], disk["M rows / CPU-s"]) > 0
    assert [(row["job"], row["rows"]) for row in jobs] == [
        *(("w1", "memory"), ("w1", "disk"), ("w3", "memory"), ("w3", "disk"))
    ]
    assert list((tmp_path / "rows").iterdir()) == []


def test_startup(tmp_path: Path) -> None:
    """A launched fleet reaches its first step."""
    [row] = run("startup.py", "--no-cold", folder=tmp_path)["rows"]
    assert 0 < row["s to first step"] < 120
    assert row["CPU s of the job"] > 0


def test_watching(tmp_path: Path) -> None:
    """Both groups of processes have a cost of a look, and each crew one of its steps."""
    small = ("--steps", "2", "--rows", "5000", "--batches", "2", "--looks", "1")
    *looks, unwatched, watched = run("watching.py", *small, folder=tmp_path)["rows"]
    assert [one["a look at"] for one in looks] == ["servers", "workers"]
    assert (unwatched["contender"], watched["contender"]) == ("unwatched", "watched")
    assert unwatched["against unwatched"] == 1
    assert all(one["CPU us / step"] > one["of it servers"] > 0 for one in (unwatched, watched))


def test_freshness(tmp_path: Path) -> None:
    """Every row reaches a cut, and the crew that is followed takes steps."""
    small = ("--steps", "2", "--rows", "5000", "--batches", "2", "--updated", "2000")
    fresh, alone, followed = run("freshness.py", *small, folder=tmp_path)["rows"]
    assert fresh["cuts"] > 1
    assert 0 <= fresh["p50 s"] <= fresh["p99 s"] <= fresh["p100 s"]
    assert alone["against alone"] == 1
    assert followed["CPU us / step"] > 0


@pytest.mark.timeout(600)  # a million rows are pushed
def test_look_ups(tmp_path: Path) -> None:
    """Each call of a followed service has a time, quiet and while rows change."""
    quiet, busy = run("look_ups.py", "--rate", "50", "--short", folder=tmp_path)["rows"]
    for row in (quiet, busy):
        assert 0 < row["p50 ms"] <= row["p99 ms"]
        assert row["CPU us / call"] > 0


def test_small_steps(tmp_path: Path) -> None:
    """Each fleet takes some time of the servers and some of the workers."""
    small = ("--steps", "2", "--servers", "1", "--groups", "all")
    rows = run("small_steps.py", *small, folder=tmp_path)["rows"]
    assert [(row["fleet"], row["contender"]) for row in rows] == [
        ("async, 1 x 1", "rows on all"),
        ("sync, 1 x 2", "rows on all"),
        ("sync, 2 x 2", "rows on all"),
    ]
    assert all(0 < row["of it servers"] < row["CPU us / step"] for row in rows)


def test_row_cache(tmp_path: Path) -> None:
    """Of rows that their reader has pushed none is unchanged; a wider bound leaves out no fewer."""
    rows = run("row_cache.py", "--steps", "8", folder=tmp_path)["rows"]
    shares = {(row["workers"], row["bound"]): row["left out"] for row in rows}
    for workers in (1, 2, 4):
        assert shares[workers, 0] == 0 < shares[workers, 4] <= shares[workers, 16] < 1


def test_distance(tmp_path: Path) -> None:
    """With two servers a round of sync mode takes more than one round trip."""
    small = ("--steps", "3", "--networks", "50 ms", "--contenders", "sync, 2 servers")
    ideal, sync = run("distance.py", *small, folder=tmp_path)["rows"]
    assert ideal["50 ms"] == 40
    assert 0 < sync["50 ms"] < 40


def test_ping_pong(tmp_path: Path) -> None:
    """Two processes wake each other over an eventfd and over a socket."""
    rows = run("ping_pong.py", "--steps", "50", folder=tmp_path)["rows"]
    assert [row["over"] for row in rows] == ["eventfd", "unix socket, 200 bytes"]
    assert all(row["round trips / s"] > 0 for row in rows)


def test_loopback(tmp_path: Path) -> None:
    """Bytes go from one process to another, in the clear and under TLS."""
    rows = run("loopback.py", "--steps", "2", folder=tmp_path)["rows"]
    assert [row["over"] for row in rows] == ["in the clear", "mutual TLS"]
    assert all(row["CPU-s / GB"] > 0 for row in rows)


def test_connections(tmp_path: Path) -> None:
    """The server's cost of a step, with some connections."""
    small = ("--steps", "80", "--connections", "4")
    [row] = run("connections.py", *small, folder=tmp_path)["rows"]
    assert row["connections"] == 4
    assert row["server's CPU us / step"] > 0


def test_rescale(tmp_path: Path) -> None:
    """Each number of servers gets a line."""
    rows = run("rescale.py", "--rows", "2000", folder=tmp_path)["rows"]
    assert [row["to servers"] for row in rows] == [4, 3, 2]


def test_many_workers(tmp_path: Path) -> None:
    """Each part of a fleet is measured for each number of workers."""
    figures = run("many_workers.py", "--workers", "4,8", folder=tmp_path)
    assert [row["workers"] for row in figures["rows"]] == [4] * 7 + [8] * 7


def test_multitable(tmp_path: Path) -> None:
    """Three modes, each with one call for all tables and with a call for each."""
    rows = run("multitable.py", "--steps", "2", folder=tmp_path)["rows"]
    assert [row["contender"].split(", ")[1] for row in rows] == ["one call", "a call for each"] * 3
    assert all(row["CPU us / step"] > 0 for row in rows)


def test_fleet_metrics(tmp_path: Path) -> None:
    """Each set of metrics gets a line."""
    rows = run("fleet_metrics.py", "--steps", "2", folder=tmp_path)["rows"]
    assert [row["metrics"] for row in rows][::3] == ["AUC", "all four"]


def test_features(tmp_path: Path) -> None:
    """Embedded and on a server: features with tables of their own or one, a table without them, a program."""
    options = ("--steps", "1", "--samples", "20", "--no-torch")
    rows = run("features.py", *options, folder=tmp_path)["rows"]
    assert [row["contender"].split(", ")[1] for row in rows] == [
        *("40 tables", "shared", "one table", "program") * 2
    ]
    assert all(row["CPU ms / step"] > 0 for row in rows)


def test_transforms(tmp_path: Path) -> None:
    """Each transform has a rate, beside look-ups without one."""
    rows = run("transforms.py", "--short", folder=tmp_path)["rows"]
    assert rows[0]["transform"] == "look-up, ids hashed"
    assert all(row["rows / CPU s"] > 0 for row in rows)


def lines_of(script: str, *options: str) -> list[str]:
    """What a script prints that writes no JSON."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    environment = {**os.environ, "PYTHONPATH": path}
    return ended(command, env=environment, timeout=170, check=True).stdout.splitlines()


def test_memory() -> None:
    """Rows of each precision, tables, workers and pushes of a burst get a line with what they take."""
    sizes = ("--rows", "300000", "--tables", "5", "--workers", "3", "--pushes", "2")
    precisions = ("--precision", "float32", "bfloat16/int8")
    rows, packed, tables, workers, *bursts, _ = lines_of("memory.py", *sizes, *precisions)
    private = [int(re.findall(r"(\d+) private", line)[0]) for line in (rows, packed)]
    assert 192 < private[0] < 1000
    assert 84 < private[1] < private[0]
    assert int(re.findall(r"(\d+) KiB a table", tables)[0]) > 0
    assert int(re.findall(r"(\d+) KiB shared", workers)[0]) > 0
    assert len(bursts) == 2


def test_staleness() -> None:
    """Every mode gets a line; those in rounds have no staleness."""
    lines = lines_of("staleness.py", "--runs", "1", "--workers", "2", "--batches", "40")
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]
    assert len(cells) == 6
    assert all(0 < float(rmse) < 2 for _, rmse, *_ in cells)
    assert {stale for name, _, _, stale in cells if name in ("one worker", "sync")} == {"0"}


def test_kernels(tmp_path: Path) -> None:
    """Dense rules, the sparse table and dedup each get lines; all took time."""
    sizes = ("--size", "4096", "--rule-size", "64000", "--rows", "8192")
    rows = run("kernels.py", "--short", *sizes, folder=tmp_path)["rows"]
    assert {"psfleet Adam", "dense lars_momentum", "insert 4,096 ids while growing"} <= {
        row["what"] for row in rows
    }
    assert all(row["ns/id"] > 0 for row in rows if "ns/id" in row)


def test_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under numba's simulator everything gets a line; with neither that nor a GPU the script says so."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    small = ("--size", "400", "--rows", "300", "--dim", "2", "--tiers", "300", "--packed", "50")
    figures = run("gpu.py", *small, folder=tmp_path)
    assert figures["title"] == "tables on numba's simulator"
    assert [row["what"].split(",")[0] for row in figures["rows"]] == [
        *("a launch", "a launch by numba", "found", "push", "pull"),
        *("copy", "psfleet Adam", "found", "found or added", "pull", "push", "push"),
        *("push", "push", "push", "pull", "pull", "pull"),
        *("fill 50 x 2 in 16 bits", "pull 30 of them"),
    ]
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(AssertionError, match="nothing was measured: there is no usable NVIDIA GPU"):
        run("gpu.py", folder=tmp_path)
    with pytest.raises(AssertionError, match="nothing was measured: there is no usable NVIDIA GPU"):
        run("gpu_jobs.py", folder=tmp_path)


@pytest.mark.timeout(600)
def test_gpu_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under numba's simulator W1 and W3 have lines for tables on the GPU and in host memory, and one for what
    was copied between both."""
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    small = ("--w1", "16", "--w3", "2", "--ids", "100", "--batches", "1", "--hidden", "3")
    jobs = run(
        "gpu_jobs.py", *small, "--steps", "1", "--link", "64", "--workers", "1", folder=tmp_path
    )
    names = ["psfleet, GPU", "psfleet, host memory"]
    *rows, w1, w3 = jobs["rows"]
    assert [row["contender"] for row in rows] == [*names, *names]
    assert jobs["skipped"] == {"torch, same GPU": "left out"}
    # A pull and a push of so many distinct ids: each brings them, the push gradients too. Rows come back, and
    # each time how many ids of each of 256 segments have no row.
    there, back = (round(w1[f"MB to the {place} / step"] * 1e6) for place in ("GPU", "host"))
    distinct = there // (2 * 8 + 64)
    assert (there, back) == (distinct * (2 * 8 + 64), distinct * 64 + 2 * 256 * 8)
    assert all(one["of the time on the GPU"] > 0 for one in (w1, w3))


@pytest.fixture(scope="module")
def run_all() -> ModuleType:
    """What `make bench` runs."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        return importlib.import_module("run_all")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_run_all_passes_flags_that_every_script_knows(run_all: ModuleType) -> None:
    """Each script's help names each flag that `make bench` may pass to it."""
    for name in run_all.SCRIPTS:
        script = str(ROOT / "benchmarks" / f"{name}.py")
        process = ended(
            [sys.executable, script, "--help"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            check=True,
        )
        missing = [flag for flag in (*run_all.FLAGS, "--json") if flag not in process.stdout]
        assert not missing, f"{name}.py does not know {', '.join(missing)}"


def test_the_versions_of_peers_are_settled() -> None:
    """Each line of a peer's requirements names one release."""
    files = sorted((ROOT / "benchmarks" / "peers" / "requirements").glob("*.txt"))
    assert [file.stem for file in files] == ["paddle", "tensorflow"]
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines), file.name


def test_pipeline_bubble(tmp_path: Path) -> None:
    """A bubble is a share; how close it is to the formula is for a quiet machine to show."""
    options = ("--steps", "1", "--seconds", "0.01", "--schedules", "1f1b")
    [row] = run("pipeline_bubble.py", *options, folder=tmp_path)["rows"]
    assert 0.03 < row["measured (median)"] < 1


def test_recompute(tmp_path: Path) -> None:
    """The plain run comes first; recompute takes at most a quarter of its activation bytes."""
    plain, *recomputed = run("recompute.py", "--steps", "1", folder=tmp_path)["rows"]
    assert plain["of the plain run"] == "100.0%"
    assert all(row["activation MB"] <= plain["activation MB"] / 4 for row in recomputed)
