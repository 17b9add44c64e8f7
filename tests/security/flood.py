"""A stranger that keeps connections to a server open, and opens each again that the server closes.

python -m tests.security.flood HOST PORT SOURCES COUNT [WORD]: from these addresses in turn, separated by
commas; WORD is what each connection sends first. It says "full" once it has had that many connections
accepted, and goes on until its standard input ends.
"""

import contextlib
import itertools
import resource
import select
import socket
import sys
from collections.abc import Iterator

# IP_BIND_ADDRESS_NO_PORT of linux/in.h: many more connections than ports of one address.
_NO_PORT = 24


def _opened(server: tuple[str, int], source: str) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.setsockopt(socket.IPPROTO_IP, _NO_PORT, 1)
    one.bind((source, 0))
    with contextlib.suppress(BlockingIOError):
        one.connect(server)
    return one


def flood(server: tuple[str, int], sources: Iterator[str], count: int, word: bytes) -> None:
    """Keep `count` connections, until standard input ends."""
    events = select.epoll()
    events.register(0, select.EPOLLIN | select.EPOLLHUP)
    sockets: dict[int, socket.socket] = {}
    accepted = 0
    while True:
        while len(sockets) < count:
            one = _opened(server, next(sources))
            sockets[one.fileno()] = one
            events.register(one, select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLHUP)
        for number, happened in events.poll():
            if number == 0:
                return
            if happened & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                sockets.pop(number).close()
                continue
            accepted += 1
            if accepted == count:
                print("full", flush=True)
            events.modify(number, select.EPOLLRDHUP)
            with contextlib.suppress(OSError):
                sockets[number].send(word)


if __name__ == "__main__":
    _, host, port, sources, count, *word = sys.argv
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    flood(
        (host, int(port)),
        itertools.cycle(sources.split(",")),
        int(count),
        bytes.fromhex("".join(word)),
    )
