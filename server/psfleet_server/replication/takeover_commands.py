"""Takeover commands: lines on standard input from the process that started this one.

    promote TERM     a standby: take the place of the primary, which has ended or is to end
    release ATTACH   a primary: no standby up to this attachment will ever take over

Only the process that started this one can write them, they arrive in order, and they need no thread
that answers calls, all of which may be waiting for the very standby that is to be released.
"""

import os
from collections.abc import Callable

from psfleet.platform.notices import say
from psfleet.platform.service_thread import ServiceThread
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.replication.standby import Standby

__all__ = ["TakeoverCommands"]


class TakeoverCommands:
    """Obeys until the input ends.

    Args:
        feed: Of this process as a primary.
        standby: This process as a standby; None: it is none.
        source: File descriptor of the orders.
    """

    def __init__(
        self, feed: LogShipping, standby: Callable[[], Standby | None], source: int = 0
    ) -> None:
        self._feed = feed
        self._standby = standby
        self._source = source

    def start(self) -> None:
        """Begin to listen; the thread ends with the process."""
        ServiceThread(self._run, "orders").start()

    def _run(self) -> None:
        text = b""
        while data := os.read(self._source, 4096):
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._obey(line.decode(errors="replace"))

    def _obey(self, line: str) -> None:
        what, _, number = line.partition(" ")
        standby = self._standby()
        if what == "release" and number.isdigit():
            self._feed.release(int(number))
        elif what == "promote" and number.isdigit() and standby is not None:
            standby.promote(int(number))
        else:
            say(f"order {line!r} is no takeover command")
