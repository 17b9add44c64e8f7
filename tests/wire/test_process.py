"""What prepare() settles for a process."""

import sys

from tests.programs import PYTHONPATH, ended

FAULTS = """
import os, resource, sys, threading
from psfleet.core.net.connections import grpc_process as process
if sys.argv[1] == "tuned":
    process.prepare()
assert "grpc" not in sys.modules
def churn():
    for _ in range(3):
        memoryview(bytearray(64 << 20))[::4096] = b"x" * (16 << 10)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=churn)
    thread.start(); thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


def faults(word: str) -> int:
    """Page faults of 3 buffers of 64 MB in another thread than the main one."""
    env = {"PATH": "/usr/bin", "PYTHONPATH": PYTHONPATH}
    return int(ended([sys.executable, "-c", FAULTS, word], check=True, env=env).stdout)


def test_large_buffers_reuse_their_memory() -> None:
    """After prepare(), buffers of 64 MB in any thread take no new pages from the kernel."""
    assert faults("tuned") < 0.05 * faults("untuned")
