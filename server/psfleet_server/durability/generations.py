"""Logs of a server in a job that has had several numbers of servers: only that of the last one counts.

Before a job gets another number of servers each of them has a new log, which begins with all that it is to
hold. The file `scale.done` of server 0 then decides at once which number the job has, and with it which logs
count: whoever starts again before that goes on from the old log, and after it from the new one.
"""

import dataclasses
import re
from pathlib import Path

from psfleet.formats import read_scaled
from psfleet.settings.environment import Environment


def decided(environment: Environment) -> tuple[Environment, int]:
    """The environment with the servers that the job has, perhaps unknown to the launcher; their generation.

    A server that is none of them is a new one. It keeps a log of its own until it gets its part.

    Raises:
        FrameError: The decision cannot be read.
    """
    if not environment.snapshot_folder:
        return environment, 0
    scaling = read_scaled(job_folder(environment))
    if not scaling.generation or environment.rank >= len(scaling.endpoints):
        return environment, 0
    if len(scaling.endpoints) != len(environment.servers):
        environment = dataclasses.replace(environment, servers=scaling.endpoints)
    return environment, scaling.generation


def job_folder(environment: Environment) -> Path:
    """Return the folder of the job's logs, in which requests and decisions are."""
    return Path(environment.snapshot_folder).parent


def log_path(environment: Environment, generation: int) -> Path:
    """Return the first file of this server's log of a generation."""
    move = f".move{generation}" if generation else ""
    return Path(environment.log_folder) / f"server.{environment.rank}{move}.log"


def remove_earlier(environment: Environment) -> None:
    """Remove this server's logs that count no more: those of earlier generations, or of an earlier server."""
    scaling = read_scaled(job_folder(environment))
    is_new = environment.rank >= len(scaling.endpoints)
    first = scaling.number + 1 if is_new and scaling.number else scaling.generation
    name = re.compile(rf"server\.{environment.rank}(?:\.move(\d+))?(?:\.\d{{6,}})?\.log")
    for path in Path(environment.log_folder).glob(f"server.{environment.rank}.*"):
        match = name.fullmatch(path.name)
        if match and int(match[1] or 0) < first:
            path.unlink()
