"""Stages that meet over TCP: with the job's keys, and nobody else."""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.utils import z85

from psfleet.core.base.errors import ConfigError, DeadlineExceeded
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.runtime.stages import StagePosition
from psfleet_worker.stage_links import StageLinks
from tests.security.attacks import ATTACKS, address_of, attack


@pytest.fixture(scope="module")
def access(tmp_path_factory: pytest.TempPathFactory) -> Access:
    """Of a job."""
    folders = make_credentials(tmp_path_factory.mktemp("job"))
    return Access(Credentials.read(folders["worker"]))


def endpoints(numbers: Iterator[int] = itertools.count(7000)) -> tuple[str, str]:  # noqa: B008
    """Two endpoints at an address of this process alone, where nobody else takes the ports meanwhile."""
    host = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.7"
    return f"tcp://{host}:{next(numbers)}", f"tcp://{host}:{next(numbers)}"


@contextlib.contextmanager
def stages(
    where: tuple[str, ...], *accesses: Access, patience: float = 10
) -> Iterator[list[StageLinks]]:
    """Stages in this process."""
    instances: list[StageLinks] = []
    try:
        for stage, access in enumerate(accesses):
            instances.append(
                StageLinks(StagePosition(0, stage, len(accesses), where), 4, patience, access)
            )
        yield instances
    finally:
        for links in instances:
            links.close()


def test_the_stages_of_a_job_meet(access: Access) -> None:
    """Arrays come as they were sent, both ways."""
    with stages(endpoints(), access, access) as (first, second):
        first.send(1, "forward", [np.arange(5)])
        assert second.receive(0, "forward")[0].tolist() == [0, 1, 2, 3, 4]
        second.send(0, "backward", [np.ones((2, 2), np.float32)])
        assert first.receive(1, "backward")[0].shape == (2, 2)


def test_what_travels_is_not_plain(access: Access) -> None:
    """Who sends in the clear, or with keys of his own, is not heard."""
    where = endpoints()
    public, secret = zmq.curve_keypair()
    # Even somebody who has got hold of the public key has no place without the secret one.
    known = zmq.curve_public(_secret(access))
    context = zmq.Context()
    try:
        with stages(where, access, access, patience=0.7) as (first, _):
            for keys in (None, (public, secret)):
                stranger = context.socket(zmq.PUSH)
                stranger.setsockopt(zmq.LINGER, 0)
                if keys:
                    stranger.curve_publickey, stranger.curve_secretkey = keys
                    stranger.curve_serverkey = known
                stranger.connect(where[0])
                with contextlib.suppress(zmq.Again):
                    stranger.send(b'{"from": 1, "tag": "x", "arrays": []}', zmq.DONTWAIT)
                with pytest.raises(DeadlineExceeded):
                    first.receive(1, "x")
                stranger.close()
    finally:
        context.destroy(linger=0)


def _secret(access: Access) -> bytes:
    assert access.credentials is not None
    return z85.encode(
        hashlib.sha256(b"psfleet stages " + access.credentials.token.encode()).digest()
    )


def test_stages_of_two_jobs_do_not_meet(access: Access, tmp_path: Path) -> None:
    """Another token, other keys."""
    other = Access(Credentials.read(make_credentials(tmp_path / "other")["worker"]))
    with stages(endpoints(), access, other, patience=0.7) as (first, second):
        with contextlib.suppress(DeadlineExceeded):
            first.send(1, "forward", [np.arange(5)])
        with pytest.raises(DeadlineExceeded):
            second.receive(0, "forward")


def test_tcp_in_the_clear_must_be_said_aloud() -> None:
    """Without credentials stages do not meet over TCP, unless told to."""
    where = endpoints()
    with (
        pytest.raises(ConfigError, match="stages cannot meet at 'tcp://127"),
        stages(where, Access(), Access()),
    ):
        pass
    with stages(where, Access(insecure=True), Access(insecure=True)) as (first, second):
        first.send(1, "forward", [np.arange(2)])
        assert second.receive(0, "forward")[0].tolist() == [0, 1]


def test_strangers_do_not_end_a_stage(access: Access) -> None:
    """Arrays come as they were sent beside every attack on the port of a stage."""
    where = endpoints()
    with stages(where, access, access) as (first, second):
        for number, name in enumerate(ATTACKS):
            if name != "no certificate":  # ZeroMQ answers no TLS, so each would wait for its time
                attack(address_of(where[1].removeprefix("tcp://")), name, 100)
            first.send(1, name, [np.full(3, number)])
            assert second.receive(0, name)[0].tolist() == [number] * 3
