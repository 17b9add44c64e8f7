"""Sends arrays between the pipeline stages of one worker over ZeroMQ, without a copy on the sender's side.

Each stage receives from one PULL socket and has one PUSH socket to each other stage, so messages from one
stage to another keep their order. The high-water mark of a socket is the queue size, so a stage that is far
ahead waits. While it waits, it reads the messages that other stages send, and keeps them in an inbox by
sender and tag. Therefore two stages that send to each other at the same time cannot block each other.

Over TCP, links are encrypted and authenticated by CURVE (https://rfc.zeromq.org/spec/26). Both ends have the
same pair of keys, derived from the job's token, and accept no other key. Without the token a process cannot
read or write messages, or pose as a stage.
"""

import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from psfleet.core.base.errors import ConfigError, DeadlineExceeded, FrameError
from psfleet.core.graph.program.operation import Array
from psfleet.core.net.connections.access import Access
from psfleet.core.runtime.stages import StagePosition

_LINGER = 2000
"""Time in milliseconds for messages to be sent after the end of the script."""


class CurveAuthenticator:
    """Keys of a job, and the thread that refuses peers with other keys."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", token: str) -> None:
        secret = hashlib.sha256(b"psfleet stages " + token.encode()).digest()
        self._secret = z85.encode(secret)
        self._public = zmq.curve_public(self._secret)
        self._guard = ThreadAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback(credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key (Z85) may connect. Called by the authenticator."""
        return hmac.compare_digest(key, self._public)

    def secure(self, socket: "zmq.Socket[bytes]") -> None:
        """Encrypt the messages of a socket. Call it before the socket binds or connects."""
        socket.curve_secretkey, socket.curve_publickey = self._secret, self._public
        if socket.type == zmq.PULL:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self._public

    def stop(self) -> None:
        """Stop the thread. Safe to call twice."""
        self._guard.stop()


def curve_for(
    context: "zmq.Context[zmq.Socket[bytes]]", endpoints: tuple[str, ...], access: Access
) -> CurveAuthenticator | None:
    """Return the authenticator of links between these endpoints.

    Returns:
        None if all links stay on this host, or if `access` allows insecure links.

    Raises:
        ConfigError: An endpoint is TCP and there are no credentials.
    """
    strange = [endpoint for endpoint in endpoints if not endpoint.startswith(("ipc:", "inproc:"))]
    if not strange or (access.insecure and access.credentials is None):
        return None
    if access.credentials is None:
        raise ConfigError(
            f"stages cannot meet at {strange[0]!r}: TCP needs credentials; name their folder in "
            "PSFLEET_TLS, use ipc:// on one host, or say PSFLEET_INSECURE=1"
        )
    return CurveAuthenticator(context, access.credentials.token)


class StageLinks:
    """Links between the pipeline stages of a worker, if each stage is a process.

    Implements psfleet.core.runtime.stages.Links.

    Args:
        place: Position of this stage, and the endpoints of all stages.
        queue_size: Maximum number of waiting messages in each direction.
        patience: Seconds to wait for another stage before giving up.
        access: Credentials of this process, or None on one host.
    """

    def __init__(
        self, place: StagePosition, queue_size: int, patience: float, access: Access | None = None
    ) -> None:
        self._place = place
        self._me = place.name(place.process)
        self._patience = patience
        self._context = zmq.Context()
        self._inbox: dict[tuple[int, str], list[Array]] = {}
        self._curve: CurveAuthenticator | None = None
        try:
            self._curve = curve_for(self._context, place.endpoints, access or Access())
            self._taking = self._socket(zmq.PULL, queue_size)
            self._taking.bind(place.endpoints[place.process])
            self._giving = {process: self._socket(zmq.PUSH, queue_size) for process in place.others}
            for process, socket in self._giving.items():
                socket.connect(place.endpoints[process])
        except BaseException:
            self.close()
            raise

    def _socket(self, kind: int, queue_size: int) -> "zmq.Socket[bytes]":
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM if kind == zmq.PULL else zmq.SNDHWM, queue_size)
        socket.setsockopt(zmq.LINGER, _LINGER)
        if self._curve is not None:
            self._curve.secure(socket)
        return socket

    def send(self, process: int, tag: str, arrays: Sequence[Array]) -> None:
        """Send arrays to a stage, under a tag that the receiver waits for. Waits while the queue is full.

        Raises:
            DeadlineExceeded: The queue stayed full for `patience` seconds.
        """
        # Arrays in C or Fortran order are sent as they are in memory; any other array is copied to C order.
        contiguous = [a if a.flags.forc else np.ascontiguousarray(a) for a in arrays]
        header = {
            "from": self._place.process,
            "tag": tag,
            "arrays": [
                [array.dtype.str, array.shape, "C" if array.flags.c_contiguous else "F"]
                for array in contiguous
            ],
        }
        payload: Any = [array.ravel(order="K").view(np.uint8).data for array in contiguous]
        frames = [json.dumps(header).encode(), *payload]
        deadline = time.monotonic() + self._patience
        while True:
            try:
                self._giving[process].send_multipart(frames, zmq.DONTWAIT, copy=False)
                return
            except zmq.Again:
                self._wait(
                    deadline, f"{self._place.name(process)} to take {tag!r}", self._giving[process]
                )

    def receive(self, process: int, tag: str) -> list[Array]:
        """Wait for the arrays that a stage sends under a tag, and return them.

        Raises:
            DeadlineExceeded: The arrays did not come within `patience` seconds.
        """
        deadline = time.monotonic() + self._patience
        while (process, tag) not in self._inbox:
            self._wait(deadline, f"{tag!r} from {self._place.name(process)}")
        return self._inbox.pop((process, tag))

    def close(self) -> None:
        """Close the sockets, after messages have had `_LINGER` ms to be sent. Safe to call twice."""
        if self._curve is not None:
            self._curve.stop()
        self._context.destroy()

    def _wait(self, deadline: float, awaited: str, full: "zmq.Socket[bytes] | None" = None) -> None:
        """Wait for a message, or for space in the queue of `full`, and put all messages in the inbox."""
        poller = zmq.Poller()
        poller.register(self._taking, zmq.POLLIN)
        if full is not None:
            poller.register(full, zmq.POLLOUT)
        remaining_seconds = deadline - time.monotonic()
        if remaining_seconds <= 0 or not poller.poll(int(remaining_seconds * 1000) + 1):
            raise DeadlineExceeded(
                f"{self._me} has waited {self._patience:g} seconds for {awaited}"
            )
        with contextlib.suppress(zmq.Again):
            while True:
                self._take_in(self._taking.recv_multipart(zmq.DONTWAIT, copy=False))

    def _take_in(self, frames: Sequence[Any]) -> None:
        try:
            header = json.loads(frames[0].bytes)
            kinds = header["arrays"]
            arrays = [
                _array(frame.buffer, *kind) for frame, kind in zip(frames[1:], kinds, strict=True)
            ]
            self._inbox[int(header["from"]), str(header["tag"])] = arrays
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise FrameError(
                f"{self._me} got a message that is none of a stage's: {error!r}"
            ) from None


def _array(buffer: Any, dtype: str, shape: Sequence[int], order: str) -> Array:
    """Return the array in a message.

    An array at an unaligned address is copied, because NumPy sums unaligned arrays in another order, which
    would change the rounding.
    """
    kind = np.dtype(dtype)
    if kind.hasobject or order not in ("C", "F"):
        raise ValueError(f"dtype {dtype!r}, order {order!r}")
    flat = np.frombuffer(buffer, kind)
    if not flat.flags.aligned:
        flat = flat.copy()
    return flat.reshape(shape, order=order)  # type: ignore[call-overload, no-any-return]
