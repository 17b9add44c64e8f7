"""Minimum cost of bytes between hosts: one process sends bytes, and another receives and ignores them.

Without encryption, and under mutual TLS of Python's ssl with a job's certificates. CPU of both processes.
"""

import os
import resource
import socket
import ssl
import statistics
import sys
import tempfile
import time
from pathlib import Path

from processes import ROOT
from reporting import Report, arguments, finish

CHUNK = 1 << 20


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    megabytes = options.steps or (64 if options.short else 1024)
    report = Report("loopback", "Bytes between two processes over TCP")
    with tempfile.TemporaryDirectory() as folder:
        contexts = _contexts(Path(folder))
        for name, ends in (("in the clear", None), ("mutual TLS", contexts)):
            durations = [transfer(megabytes, ends) for _ in range(options.runs)]
            cpu, wall = [*map(statistics.median, zip(*durations, strict=True))]
            report.rows.append(
                {
                    "over": name,
                    "CPU-s / GB": cpu,
                    "GB / s": 1 / wall,
                    "largest CPU-s": max(cpu for cpu, _ in durations),
                    "runs": options.runs,
                }
            )
    finish(report, options.json)


def transfer(
    megabytes: int, contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None
) -> tuple[float, float]:
    """Return the CPU seconds of both processes and the wall-clock seconds for a gigabyte."""
    sender, receiver = _connected()
    size = megabytes * CHUNK
    ready, go = os.pipe()
    child = os.fork()
    if not child:
        end = contexts[0].wrap_socket(sender) if contexts else sender
        chunk, left = memoryview(bytearray(CHUNK)), size
        os.write(go, b".")
        before = _cpu()
        while left:
            left -= end.send(chunk[:left])
        os.write(go, str(_cpu() - before).encode())
        os._exit(0)
    sender.close()
    end = contexts[1].wrap_socket(receiver, server_side=True) if contexts else receiver
    with end:
        os.read(ready, 1)
        buffer, left, before, began = bytearray(CHUNK), size, _cpu(), time.perf_counter()
        while left:
            left -= end.recv_into(buffer) or left
        cpu, wall = _cpu() - before, time.perf_counter() - began
    os.waitpid(child, 0)
    cpu += float(os.read(ready, 64))
    os.close(ready)
    os.close(go)
    return cpu / size * 1e9, wall / size * 1e9


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
        return here, receiver


def _contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the sender and of the receiver."""
    sys.path.insert(0, str(ROOT))
    from psfleet.core.net.connections.certificates import make_credentials

    credentials = make_credentials(folder)["server"]
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for context in made:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(credentials / "ca.pem")
        context.load_cert_chain(credentials / "cert.pem", credentials / "key.pem")
    return made


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
