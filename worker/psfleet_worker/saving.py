"""A checkpoint of the whole fleet: every server writes its file, this worker makes it whole."""

import shutil
from pathlib import Path

from psfleet.checkpoint import Cut, Manifest, ShardFile, begin_save, finish_save
from psfleet.wire.specs import read_spec
from psfleet.wire.v1 import shard_pb2
from psfleet_worker.client import wait_all
from psfleet_worker.connection import Connection

__all__ = ["save"]


def save(fleet: Connection, path: str) -> None:
    """Write every table to the folder `path`, which appears whole or not at all."""
    absolute = str(Path(path).absolute())
    folder = begin_save(absolute)
    try:
        answers = wait_all(
            fleet.to_all(
                "Shard/Save", shard_pb2.SaveRequest(path=folder), seconds=fleet.patience.wait
            )
        )
        replies = [shard_pb2.SaveReply.FromString(answer) for answer in answers]
        specs = tuple(read_spec(table.spec) for table in replies[0].tables)
        files = tuple(_file(reply) for reply in replies)
        finish_save(folder, absolute, Manifest(specs, files, Cut(mode=fleet.mode)))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _file(reply: shard_pb2.SaveReply) -> ShardFile:
    dense = [table for table in reply.tables if table.spec.kind == "dense"]
    return ShardFile(
        reply.file,
        reply.sha256,
        reply.bytes,
        {table.spec.name: (table.low, table.high) for table in dense},
        {table.spec.name: table.step for table in reply.tables},
    )
