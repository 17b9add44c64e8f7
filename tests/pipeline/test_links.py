"""Messages between stages: whole, in order, without a standstill, with a deadline."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from psfleet.core.base.errors import DeadlineExceeded, FrameError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.program.operation import Array
from psfleet.core.graph.program.pipeline.chunk import pack, unpack
from psfleet.core.runtime.stages import StagePosition
from psfleet_worker.stage_links import StageLinks
from tests.trainings import in_threads


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[StageLinks]]:
    """Links of two stages, with queues of two and little patience."""
    links = make_links(tmp_path, 2, queue_size=2, patience=0.3)
    yield links
    for one in links:
        one.close()


def make_links(
    folder: Path, stages: int, queue_size: int = 30, patience: float = 20.0
) -> list[StageLinks]:
    """Links of all stages of one worker."""
    endpoints = tuple(f"ipc://{folder}/{stage}" for stage in range(stages))
    return [
        StageLinks(StagePosition(0, stage, stages, endpoints), queue_size, patience)
        for stage in range(stages)
    ]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(300_000, dtype=np.float32).reshape(500, 600),
        np.float32(3.5) * np.ones(()),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.zeros((0, 5), np.float32),
        np.arange(40.0)[::3],
        np.array([True, False]),
    ],
    ids=["large", "single", "turned", "none", "strided", "bool"],
)
def test_arrays_arrive_as_they_were(pair: list[StageLinks], array: Array) -> None:
    """Values, shape, dtype and memory order; out of turn too."""
    pair[0].send(1, "later", pack(array))
    pair[0].send(1, "empty", pack(None))
    actual = unpack(pair[1].receive(0, "later"))
    assert isinstance(actual, np.ndarray)
    np.testing.assert_array_equal(actual, array)
    assert (actual.dtype, actual.shape, actual.flags.aligned) == (array.dtype, array.shape, True)
    if array.flags.forc:
        assert actual.flags.f_contiguous == array.flags.f_contiguous
    assert unpack(pair[1].receive(0, "empty")) is None


def test_sparse_gradients_arrive(pair: list[StageLinks]) -> None:
    """Ids and rows."""
    grad = SparseGrad(np.array([3, 1, 3]), np.ones((3, 2), np.float32))
    pair[1].send(0, "rows", pack(grad))
    actual = unpack(pair[0].receive(1, "rows"))
    assert isinstance(actual, SparseGrad)
    assert actual.ids.tolist() == [3, 1, 3]


def test_a_stage_that_is_silent_is_named(pair: list[StageLinks]) -> None:
    """After the deadline, by who waited for what from whom."""
    with pytest.raises(
        DeadlineExceeded,
        match=r"worker 0 stage 1 has waited 0\.3 seconds for 'x' from "
        "worker 0 stage 0",
    ):
        pair[1].receive(0, "x")


def test_a_full_queue_holds_the_sender_up(pair: list[StageLinks]) -> None:
    """With nobody to take them in, large messages end in a deadline; taken in, all arrive."""
    large = np.ones(1 << 20, np.float32)
    with pytest.raises(DeadlineExceeded, match="for worker 0 stage 1 to take"):
        _send_many(pair[0], large)
    assert int(pair[1].receive(0, "0")[0].sum()) == 1 << 20


def _send_many(links: StageLinks, array: Array) -> None:
    for number in range(100):
        links.send(1, str(number), [array])


def test_two_that_send_to_each_other_do_not_block(tmp_path: Path) -> None:
    """Each sends far more than a queue holds before it receives anything."""
    both = make_links(tmp_path, 2, queue_size=1)
    large, sums = np.ones(1 << 18, np.float32), [0.0, 0.0]

    def work(stage: int) -> None:
        for number in range(20):
            both[stage].send(1 - stage, str(number), [large])
        sums[stage] = sum(
            both[stage].receive(1 - stage, str(number))[0].sum() for number in range(20)
        )

    in_threads([partial(work, stage) for stage in (0, 1)])
    for one in both:
        one.close()
    assert sums == [20.0 * (1 << 18)] * 2


@pytest.mark.parametrize(
    "frames",
    [
        [b"{"],
        [b'{"from": 0, "tag": "x", "arrays": [["|O", [1], "C"]]}', b"12345678"],
        [b'{"from": 0, "tag": "x", "arrays": [["<f4", [9], "C"]]}', b"1234"],
        [b'{"from": 0, "tag": "x", "arrays": []}', b"1234"],
    ],
)
def test_messages_that_are_none_are_refused(
    pair: list[StageLinks], tmp_path: Path, frames: list[bytes]
) -> None:
    """Bad JSON, objects in place of numbers, a wrong length: an error with a name."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"ipc://{tmp_path}/1")
        socket.send_multipart(frames)
        with pytest.raises(FrameError, match="worker 0 stage 1 got a message that is none"):
            pair[1].receive(0, "x")
