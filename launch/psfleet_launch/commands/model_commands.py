"""The commands for a trained model: export, predict, serve and models.

Each command checks its options and calls `psfleet.serving`. `predict` starts several processes. Each writes
parts of the predictions that no other process has begun, which the processes see in the folder of the
predictions.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import click

from psfleet.core.base.errors import ConfigError, PsfleetError
from psfleet.core.base.object_store import readable, upload
from psfleet.core.base.settings.kinds import ExportFormat, RowForm, shown_url, url_of
from psfleet.core.base.threads import handled, stops_on_signals

_LOOK = 0.02  # seconds between two looks whether a process has ended
_ROWS = click.Choice(get_args(RowForm))
_FEATURES = click.option(
    "--features",
    default="",
    metavar="FILE|MODULE:NAME",
    help="What the inputs are: a TOML or JSON file, or a FeatureSet of a module; else the model's own.",
)


@click.command()
@click.argument("model")
@click.argument("out")
@click.option(
    "--format",
    "kind",
    type=click.Choice(get_args(ExportFormat)),
    default="safetensors",
    show_default=True,
    help="Kind of the file of arrays. With onnx and faiss it is safetensors, with a graph or an index beside "
    "it; the graph takes rows and numbers as look-ups and transforms make them.",
)
@click.option("--rows", type=_ROWS, help="Form of the rows; else float32, or that of the export.")
@click.option("--checkpoint", metavar="FOLDER", help="The snapshot with the weights.")
@click.option(
    "--features", metavar="FILE", help="A TOML file of the inputs, to come with the export."
)
@click.option(
    "--min-count",
    type=click.FloatRange(0),
    default=0,
    metavar="N",
    help="Leave out rows that were shown less often.",
)
def export(
    model: str,
    out: str,
    kind: str,
    rows: str | None,
    checkpoint: str | None,
    features: str | None,
    min_count: float,
) -> int:
    """Write the weights of MODEL to the folder OUT, without optimizer state.

    MODEL is the folder of an inference model, or MODULE:NAME of a function that makes the model;
    --checkpoint then has the weights. psfleet serve accepts OUT as the model, or as the checkpoint of
    MODULE:NAME.
    """
    from psfleet.serving import model_export

    model_export.export(
        model,
        out,
        kind,  # type: ignore[arg-type]  # the option's choices
        rows,  # type: ignore[arg-type]
        checkpoint=checkpoint,
        features=features,
        min_count=min_count,
    )
    print(out)
    return 0


@click.command()
@click.argument("model")
@click.argument("data", nargs=-1, required=True)
@click.option("--to", "target", required=True, metavar="FOLDER", help="Folder of the predictions.")
@_FEATURES
@click.option("--checkpoint", default="", metavar="FOLDER", help="The snapshot with the weights.")
@click.option(
    "--column",
    "columns",
    multiple=True,
    help="Column of the data to copy to the predictions; repeatable.",
)
@click.option(
    "--processes", type=click.IntRange(1), default=1, show_default=True, help="Number of processes."
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=1024, show_default=True, help="Rows of a batch."
)
@click.option(
    "--part-rows",
    type=click.IntRange(1),
    default=1 << 20,
    show_default=True,
    help="Rows after which a file of predictions ends, at the end of a row group.",
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
    variables of a program. If the command was ended, run it again to do the remaining work. It can also run
    on several machines that share the folder.
    """
    from psfleet_launch.prediction_job import PredictionJob

    fields: dict[str, Any] = {n: list(v) if isinstance(v, tuple) else v for n, v in options.items()}
    for name in ("model", "checkpoint"):
        if url_of(fields[name]) is not None:
            fields[name] = str(readable(fields[name]))
    target, url = fields["target"], url_of(fields["target"])
    with tempfile.TemporaryDirectory(prefix="psfleet-") as staging:
        job = PredictionJob(**{**fields, "target": staging if url else target})
        predictions = (
            job.predictions()
        )  # report an error of the job here, once, and not in every process
        _run(json.dumps(asdict(job)), processes)
        rows, bad = predictions.summary()
        if url is not None:
            upload(Path(staging), url)
    left_out = f", {bad:,} rows skipped" if bad else ""
    print(f"{shown_url(target)}: {rows:,} rows{left_out}")
    return 0


def _run(job: str, count: int) -> None:
    """Predict in `count` processes. Each has one thread, so that results do not depend on the number."""
    command = [sys.executable, "-m", "psfleet_launch.prediction_job", job]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    processes = [subprocess.Popen(command, env=environment) for _ in range(count)]
    try:
        with handled([signal.SIGTERM], lambda *_: sys.exit(128 + signal.SIGTERM)):
            _wait(processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


def _wait(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait until all processes have ended with exit code 0.

    Raises:
        PsfleetError: A process has failed.
    """
    waiting = list(processes)
    while waiting:
        for process in [process for process in waiting if process.poll() is not None]:
            waiting.remove(process)
            if code := process.returncode:
                how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                raise PsfleetError(
                    f"a process of the prediction {how}; run the command again, and it does what is left"
                )
        time.sleep(_LOOK)


@click.command()
@click.argument("models", nargs=-1, metavar="[NAME=]MODEL...")
@_FEATURES
@click.option(
    "--checkpoint",
    default="",
    metavar="FOLDER",
    help="The snapshot or export with the weights, or a folder of them by number; with --follow a snapshot "
    "of the job to begin with.",
)
@click.option(
    "--follow",
    default="",
    metavar="JOB",
    help="Weights of a running job, kept up to date: its folder of logs or its servers' endpoints.",
)
@click.option("--part", default="1/1", metavar="K/N", help="Follow the K-th of N parts of the ids.")
@click.option("--rows", type=_ROWS, help="Form in memory; else float32, or that of the export.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0), default=8500, show_default=True, help="Port of gRPC."
)
@click.option(
    "--http-port", type=click.IntRange(0), default=8501, show_default=True, help="Port of HTTP."
)
@click.option(
    "--tls", default="", metavar="FOLDER", help="A server's credentials, made by psfleet certs."
)
@click.option("--insecure", is_flag=True, help="Neither TLS nor token, on any address.")
@click.option(
    "--max-batch",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    help="Most samples of a batch, and of a request.",
)
@click.option(
    "--max-delay-ms",
    type=click.FloatRange(0),
    default=0,
    show_default=True,
    help="Time that a request may wait for others.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(1),
    default=100,
    show_default=True,
    help="Most requests that wait; more are refused.",
)
@click.option(
    "--pin", is_flag=True, help="Newer versions wait for psfleet models ADDRESS --activate."
)
def serve(models: tuple[str, ...], **options: Any) -> int:
    """Serve predictions and rows of MODELs over gRPC and HTTP.

    MODEL is the folder of an inference model or of an export, a folder with such folders as numbered
    versions, or MODULE:NAME of a function that makes a torch module or the variables of a program. The
    model's name is the last part of its path, or NAME. With --follow it has the present weights of a
    running job; without a MODEL only rows can be looked up.
    """
    from psfleet.core.net.connections.connection_limits import raise_descriptor_limit
    from psfleet.serving import Server, VersionedModel

    raise_descriptor_limit()
    by_name = dict(map(_named, models))
    if len(by_name) < len(models):
        raise ConfigError("two models have the same name; give them others with NAME=MODEL")
    if options["checkpoint"] and len(by_name) > 1:
        raise ConfigError(
            "--checkpoint is for one model; serve the others by processes of their own"
        )
    if options["part"] != "1/1" and not options["follow"]:
        raise ConfigError(f"--part is {options['part']!r}; it goes with --follow: leave it out")
    followers = _followed(by_name, options) if options["follow"] else {}
    all_models = followers or {
        name: VersionedModel(
            model,
            options["features"] or None,
            checkpoint=options["checkpoint"],
            rows=options["rows"],
        )
        for name, model in by_name.items()
    }
    end = threading.Event()
    try:
        with (
            stops_on_signals(end.set),
            Server(
                {**all_models},
                options["host"],
                options["port"],
                options["http_port"],
                tls=options["tls"],
                insecure=options["insecure"],
                max_batch=options["max_batch"],
                max_delay=options["max_delay_ms"] / 1e3,
                max_queue=options["max_queue"],
                follow_versions=not options["pin"],
            ) as server,
        ):
            print(
                f"serving {', '.join(all_models)}: gRPC {server.grpc_address}, HTTP {server.http_address}",
                flush=True,
            )
            end.wait()
    finally:
        for follower in followers.values():
            follower.rows.close()
    return 0


def _followed(by_name: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    from psfleet.serving.model import follow

    if len(by_name) > 1:
        raise ConfigError(
            "--follow takes the weights of one model from a job; serve others by processes of their own"
        )
    k, _, n = options["part"].partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise ConfigError(f"--part is {options['part']!r}; say K/N, such as 2/4")
    part = int(k) - 1, int(n)
    name, model = next(iter(by_name.items()), ("rows", ""))
    return {
        name: follow(
            options["follow"],
            model,
            options["features"] or None,
            rows=options["rows"] or "float32",
            part=part,
            snapshot=options["checkpoint"],
        )
    }


def _named(text: str) -> tuple[str, str]:
    name, sign, model = text.partition("=")
    if sign and "/" not in name:
        return name, model
    if (url := url_of(text)) is not None:
        return shown_url(url).rstrip("/").rpartition("/")[2], text
    return (text.rpartition(":")[2] if ":" in text else Path(text).resolve().name), text


@click.command()
@click.argument("address")
@click.option("--model", default="", help="Name of the model, if there are several.")
@click.option("--activate", type=click.IntRange(1), help="The version that gets all requests.")
@click.option(
    "--split",
    default="",
    metavar="VERSION=PERCENT",
    help="Version that gets a part of the requests.",
)
@click.option(
    "--tls", default="", metavar="FOLDER", help="A worker's credentials, for a service with TLS."
)
def models(address: str, model: str, activate: int | None, split: str, tls: str) -> int:
    """Show the models of the service at ADDRESS, or choose the versions that answer requests.

    A version is loaded completely before it gets a request. The previous version stays loaded: --activate
    with its number returns to it at once.
    """
    from psfleet.serving.serving_client import ServingClient

    with ServingClient(address, tls) as client:
        if activate is not None:
            client.route(model, activate, 100)
        if split:
            version, _, percentage = split.partition("=")
            try:
                number, part = int(version), float(percentage.rstrip("%"))
            except ValueError:
                raise ConfigError(
                    f"--split is {split!r}; say VERSION=PERCENT, such as 3=10%"
                ) from None
            client.route(model, number, part)
        for line in client.lines():
            print(line)
    return 0
