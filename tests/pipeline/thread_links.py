"""Links between stages that are threads of one process."""

import threading
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from psfleet.core.base.errors import DeadlineExceeded
from psfleet.core.runtime.stages import Links

Array = NDArray[Any]


class ThreadLinks:
    """The links of all stages.

    Args:
        stages: How many.
        patience: Seconds that a receiver waits.
    """

    def __init__(self, stages: int, patience: float = 30.0) -> None:
        self.stages = stages
        self._patience = patience
        self._boxes: dict[tuple[int, int, str], list[Array]] = {}
        self._changed = threading.Condition()

    def of(self, stage: int) -> Links:
        """The links of one stage."""
        return _Mailboxes(self, stage)

    def put(self, key: tuple[int, int, str], arrays: Sequence[Array]) -> None:
        """Leave a message."""
        with self._changed:
            self._boxes[key] = list(arrays)
            self._changed.notify_all()

    def take(self, key: tuple[int, int, str]) -> list[Array]:
        """Wait for a message and take it."""
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._boxes, self._patience):
                raise DeadlineExceeded(
                    f"stage {key[1]} has waited {self._patience:g} seconds for "
                    f"{key[2]!r} from stage {key[0]}"
                )
            return self._boxes.pop(key)


class _Mailboxes:
    """The links of one stage."""

    def __init__(self, post: ThreadLinks, stage: int) -> None:
        self._post = post
        self._stage = stage

    def send(self, stage: int, tag: str, arrays: Sequence[Array]) -> None:
        """As Links.send."""
        self._post.put((self._stage, stage, tag), arrays)

    def receive(self, stage: int, tag: str) -> list[Array]:
        """As Links.receive."""
        return self._post.take((stage, self._stage, tag))
