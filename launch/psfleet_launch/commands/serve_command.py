"""`psfleet serve`: predictions and rows for other processes; `psfleet models`: which version serves."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import click

from psfleet.errors import ConfigError
from psfleet.platform.stop_signals import stops_on_signals
from psfleet.settings.choices import RowForm
from psfleet.settings.kinds import shown_url, url_of

_ROWS = click.Choice(get_args(RowForm))


@click.command()
@click.argument("models", nargs=-1, metavar="[NAME=]MODEL...")
@click.option(
    "--features",
    default="",
    metavar="FILE|MODULE:NAME",
    help="What the inputs are: a TOML or JSON file, or a FeatureSet of a module; else the model's own.",
)
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
@click.option("--port", type=click.IntRange(0), default=8500, show_default=True, help="Of gRPC.")
@click.option(
    "--http-port", type=click.IntRange(0), default=8501, show_default=True, help="Of HTTP."
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

    MODEL is the folder of an inference model or an export, a folder that has such folders by number as
    versions, or MODULE:NAME of a function that makes a torch module or the variables of a program. Its name
    is the last part of its path, or NAME. With --follow it has the weights of the job; without a MODEL
    the rows can be looked up.
    """
    from psfleet.serving import Server, VersionedModel

    by_name = dict(map(_named, models))
    if len(by_name) < len(models):
        raise ConfigError("two models have the same name; give them others with NAME=MODEL")
    if options["checkpoint"] and len(by_name) > 1:
        raise ConfigError(
            "--checkpoint is for one model; serve the others by processes of their own"
        )
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
        for each in followers.values():
            each.rows.close()
    return 0


def _followed(by_name: Mapping[str, str], options: Mapping[str, Any]) -> dict[str, Any]:
    """The model by its name, with the weights of a job."""
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
@click.option("--model", default="", help="Which one, if there are several.")
@click.option("--activate", type=click.IntRange(1), help="The version that gets all requests.")
@click.option("--split", default="", metavar="VERSION=PERCENT", help="It gets a part of them.")
@click.option(
    "--tls", default="", metavar="FOLDER", help="A worker's credentials, for a service with TLS."
)
def models(address: str, model: str, activate: int | None, split: str, tls: str) -> int:
    """Show the models of the service at ADDRESS, or say which version gets which part of the requests.

    A version is loaded before it gets a request, and the one before it stays loaded: --activate with its
    number leads back at once.
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
