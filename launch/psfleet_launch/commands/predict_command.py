"""`psfleet predict`: predictions for files from a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from psfleet.errors import PsfleetError
from psfleet.platform.object_store import readable, upload
from psfleet.platform.stop_signals import handled
from psfleet.settings.kinds import shown_url, url_of

_LOOK = 0.02  # seconds between two looks whether a process has ended


@click.command()
@click.argument("model")
@click.argument("data", nargs=-1, required=True)
@click.option("--to", "target", required=True, metavar="FOLDER", help="Of the predictions.")
@click.option(
    "--features",
    default="",
    metavar="FILE|MODULE:NAME",
    help="What the inputs are: a TOML or JSON file, or a FeatureSet of a module; else the model's own.",
)
@click.option("--checkpoint", default="", metavar="FOLDER", help="The snapshot with the weights.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    help="Of the data, to come with the predictions; repeatable.",
)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="How many.")
@click.option(
    "--batch-size", type=click.IntRange(1), default=1024, show_default=True, help="In rows."
)
@click.option(
    "--part-rows",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    help="A file of predictions ends with the row group that gives it so many rows.",
)
@click.option(
    "--bad-rows",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What becomes of a row that cannot be used.",
)
def predict(processes: int, **options: Any) -> int:
    """Write predictions of MODEL for the rows of DATA: Parquet files and folders of them, or .csv, .tsv and
    .libsvm files.

    MODEL is the folder of an inference model, or MODULE:NAME of a function that makes a torch module or the
    variables of a program. The same command, also when it was ended or on other machines that share the
    folder, does what is left.
    """
    from psfleet_launch.prediction.prediction_job import PredictionJob

    fields: dict[str, Any] = {n: list(v) if isinstance(v, tuple) else v for n, v in options.items()}
    for name in ("model", "checkpoint"):
        if url_of(fields[name]) is not None:
            fields[name] = str(readable(fields[name]))
    target, url = fields["target"], url_of(fields["target"])
    with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
        job = PredictionJob(**{**fields, "target": staging if url else target})
        predictions = job.predictions()  # what is wrong with the job is said once
        _run(json.dumps(asdict(job)), processes)
        rows, bad = predictions.summary()
        if url is not None:
            upload(Path(staging), url)
    left_out = f", {bad:,} rows skipped" if bad else ""
    print(f"{shown_url(target)}: {rows:,} rows{left_out}")
    return 0


def _run(job: str, count: int) -> None:
    """Let processes do it. Each computes with one thread, so that bits do not depend on their number."""
    command = [sys.executable, "-m", "psfleet_launch.prediction.prediction_process", job]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    own = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        with handled([signal.SIGTERM], lambda *_: sys.exit(128 + signal.SIGTERM)):
            _wait(own)
    finally:
        for process in own:
            process.terminate()
        for process in own:
            process.wait()


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Return when all have ended well.

    Raises:
        PsfleetError: One has not.
    """
    waiting = list(processes)
    while waiting:
        for process in [each for each in waiting if each.poll() is not None]:
            waiting.remove(process)
            if code := process.returncode:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise PsfleetError(
                    f"a process of the prediction {how}; run the command again, and it does what is left"
                )
        time.sleep(_LOOK)
