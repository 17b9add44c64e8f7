"""The commands `psfleet ckpt` and `psfleet log`: list, check, compare and convert snapshots and logs of
servers.

`psfleet ckpt` calls `psfleet.checkpoint` and prints the results. `psfleet log` runs the server program,
because only that program can read its logs and the launcher must not import it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import click

from psfleet_launch.commands.options import CommandGroup


@click.group(cls=CommandGroup)
def ckpt() -> None:
    """List, verify, compare, migrate, export and import snapshots, or split them for other servers."""


@ckpt.command("ls")
@click.argument("path", default=".")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_snapshots(path: str, as_json: bool) -> int:
    """Describe the snapshot at PATH, or all snapshots in the folder PATH; exit code 1 if one cannot be
    opened.

    Only the lengths of files and the shapes of tensors are checked. `verify` compares every byte with its
    checksum.
    """
    from psfleet.checkpoint import MANIFEST, Snapshot
    from psfleet.core.base.errors import CheckpointError

    parent = Path(path)
    candidates = [parent, *parent.glob("*/"), *parent.glob("snapshots/*/")]
    snapshots = sorted(folder for folder in candidates if os.path.lexists(folder / MANIFEST))
    if not snapshots:
        raise CheckpointError(f"{path!r} is no snapshot and holds none")
    errors = 0
    for folder in snapshots:
        try:
            manifest = Snapshot(folder, read_back=False).manifest
            print(_object(folder, manifest) if as_json else _line(folder, manifest))
        except CheckpointError as error:
            errors += 1
            entry = {"path": str(folder), "error": str(error)}
            print(json.dumps(entry) if as_json else f"{folder}  {error}")
    return 1 if errors else 0


def _line(folder: Path, manifest: Any) -> str:
    from psfleet.core.engine.consistency import find_mode

    cut = manifest.cut
    where = f"round {cut.round}" if find_mode(cut.mode).has_rounds else f"{_pushes(cut)} pushes"
    size = sum(file.bytes for file in manifest.files)
    base = f"  changes since {manifest.base.path}" if manifest.base else ""
    return (
        f"{folder}  {manifest.kind}  {cut.mode or 'no training'}, {where}  "
        f"{len(manifest.files)} server(s), {len(manifest.tables)} table(s), "
        f"{size / 2**20:,.1f} MiB{base}"
    )


def _object(folder: Path, manifest: Any) -> str:
    """Return the description of a snapshot as JSON, with the same facts as `_line`."""
    cut = manifest.cut
    return json.dumps(
        {
            "path": str(folder),
            "kind": manifest.kind,
            "mode": cut.mode,
            "round": cut.round,
            "pushes": _pushes(cut),
            "servers": len(manifest.files),
            "tables": len(manifest.tables),
            "bytes": sum(file.bytes for file in manifest.files),
            "base": manifest.base.path if manifest.base else None,
        }
    )


def _pushes(cut: Any) -> int:
    return sum(last for _, last in cut.pushes.values())


@ckpt.command()
@click.argument("path")
def verify(path: str) -> int:
    """Check every byte of the snapshot at PATH and of the snapshots that it builds on."""
    from psfleet.checkpoint import Snapshot

    snapshot = Snapshot(path)
    snapshot.check_ids()
    print(f"{path} is whole: {_line(Path(path), snapshot.manifest)}")
    return 0


@ckpt.command()
@click.argument("first")
@click.argument("second")
def diff(first: str, second: str) -> int:
    """Show the differences between two snapshots table by table; exit code 1 if there are any."""
    from psfleet.checkpoint import compare

    differences = compare(first, second)
    for d in differences:
        if d.is_equal:
            print(f"{d.table}: equal, {d.equal:,} after {d.steps[0]:,} updates")
        elif d.note:
            print(f"{d.table}: {d.note}")
        else:
            print(
                f"{d.table}: {d.changed:,} differ (a weight by {d.largest:.3g} at most), "
                f"{d.missing:,} gone, {d.added:,} new, {d.equal:,} equal; "
                f"updates {d.steps[0]:,} and {d.steps[1]:,}"
            )
    return 0 if all(d.is_equal for d in differences) else 1


@ckpt.command()
@click.argument("path")
@click.argument("target")
@click.option("--servers", type=click.IntRange(1), required=True, help="Number of servers.")
def reshard(path: str, target: str, servers: int) -> int:
    """Write the full snapshot at PATH to TARGET for another number of servers. Loading does not need this."""
    from psfleet import checkpoint

    manifest = checkpoint.reshard(path, target, servers)
    print(_line(Path(target), manifest))
    return 0


@ckpt.command()
@click.argument("path")
@click.argument("target")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "npz", "parquet"]),
    default="safetensors",
    show_default=True,
    help="Format of the files.",
)
@click.option("--ids", is_flag=True, help="Write the ids of sparse tables as CSV too.")
@click.option(
    "--table", "tables", multiple=True, metavar="TABLE", help="Export only this table; repeatable."
)
@click.option(
    "--rows",
    metavar="FILE",
    help="Export only rows of the ids in FILE, which has one on each line.",
)
def export(
    path: str,
    target: str,
    kind: Literal["safetensors", "npz", "parquet"],
    ids: bool,
    tables: tuple[str, ...],
    rows: str | None,
) -> int:
    """Write each table of the snapshot at PATH as one file of plain arrays in the folder TARGET."""
    from psfleet import checkpoint

    row_ids = None if rows is None else _read_ids(Path(rows))
    for file in checkpoint.export(path, target, kind, ids, tables, row_ids):
        print(file)
    return 0


def _read_ids(file: Path) -> Any:
    import numpy as np

    from psfleet.core.base.errors import IdError
    from psfleet.data.feature_sets.value_types import whole_number

    lines = file.read_text(encoding="utf-8", errors="replace").split()
    try:
        return np.array([whole_number(line) for line in lines], np.int64)
    except ValueError as error:
        raise IdError(
            f"{str(file)!r} must have one whole number of 64 bits a line, not {str(error)!r:.80}"
        ) from None


@ckpt.command("import")
@click.argument("path")
@click.argument("source")
@click.option("--table", required=True, metavar="TABLE", help="Table that gets the rows.")
@click.option("--to", "target", required=True, metavar="FOLDER", help="Folder of the new snapshot.")
@click.option(
    "--name",
    default="",
    help="Name of the weights in SOURCE, or of its table if SOURCE is a snapshot.",
)
@click.option(
    "--buckets",
    type=click.IntRange(0),
    default=0,
    help="Number of buckets for the hashes of words; 0 means any id.",
)
@click.option("--salt", default="", help="Salt for the hashes of words.")
def import_source(
    path: str, source: str, table: str, target: str, name: str, buckets: int, salt: str
) -> int:
    """Write the snapshot at PATH again, with the rows of SOURCE in one of its tables.

    SOURCE is another snapshot, an export, arrays (npy, npz, safetensors, parquet), a tensor or state dict of
    torch (pt), or a text file of words and weights in the format of word2vec and GloVe (txt, vec).
    """
    from psfleet.checkpoint import import_rows, read_rows

    if not name and Path(source).is_dir():
        name = table
    rows = read_rows(source, name, buckets, salt)
    print(f"{table}: {len(rows.ids):,} rows from {source}")
    print(_line(Path(target), import_rows(path, target, table, rows)))
    return 0


@ckpt.command()
@click.argument("path")
@click.option(
    "--features",
    required=True,
    metavar="FILE|MODULE:NAME",
    help="What the model is to have: a TOML file, or a FeatureSet of a module.",
)
@click.option("--to", "target", required=True, metavar="FOLDER", help="Folder of the new snapshot.")
@click.option(
    "--keep",
    multiple=True,
    metavar="TABLE",
    help="Keep this sparse table, which belongs to no feature.",
)
@click.option(
    "--drop",
    multiple=True,
    metavar="TABLE",
    help="Drop this table, dense or of a feature, so that it starts from its first values.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="TABLE=SHAPE",
    help="Give a dense table longer axes: fc_0.w_0=129x64.",
)
@click.option("--yes", is_flag=True, help="Apply the plan without asking.")
def migrate(
    path: str,
    features: str,
    target: str,
    keep: tuple[str, ...],
    drop: tuple[str, ...],
    shapes: tuple[str, ...],
    yes: bool,
) -> int:
    """Write the snapshot at PATH again for a changed set of features, after showing a plan."""
    from psfleet.checkpoint import plan_migration
    from psfleet.features import find_features

    new_shapes = dict(map(_shape, shapes))
    plan = plan_migration(path, find_features(features), keep, drop, new_shapes)
    print(plan)
    if not (yes or click.confirm(f"Write {target}?")):
        print("nothing was written")
        return 1
    print(_line(Path(target), plan.apply(target)))
    return 0


def _shape(text: str) -> tuple[str, tuple[int, ...]]:
    from psfleet.core.base.errors import ConfigError

    name, _, shape = text.rpartition("=")
    if not name or not all(part.isascii() and part.isdigit() for part in shape.split("x")):
        raise ConfigError(f"--shape is {text!r}; write TABLE=129x64")
    return name, tuple(map(int, shape.split("x")))


@click.group(cls=CommandGroup)
def log() -> None:
    """Verify and replay the logs of servers."""


@log.command("verify")
@click.argument("path")
def verify_log(path: str) -> int:
    """Check every byte of the log whose first or only file is PATH, and count its records."""
    return _server_program("verify", path)


@log.command()
@click.argument("path")
@click.option("--snapshots", default="", help="The job's snapshots; by default beside the log.")
@click.option(
    "--save", default="", metavar="FOLDER", help="Write the resulting tables as a snapshot."
)
def replay(path: str, snapshots: str, save: str) -> int:
    """Apply the records of a log and print the resulting state of the server. The log is not changed."""
    return _server_program("replay", path, snapshots, save)


def _server_program(*words: str) -> int:
    return subprocess.run(
        [sys.executable, "-P", "-m", "psfleet_server.durability.inspect_log", *words], check=False
    ).returncode
