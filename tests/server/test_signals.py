"""Signals that end a server or a service, at the moments at which a handler in Python cannot."""

import sys

from tests.programs import ended

_PROGRAM = """
import signal, threading
from psfleet.core.base.threads import stops_on_signals

lock, stopped = threading.Lock(), threading.Event()

def stop():
    with lock:
        stopped.set()

with stops_on_signals(stop):
    with lock:
        signal.raise_signal(signal.{name})
    stopped.wait()
stopped.clear()
with stops_on_signals(stop):
    other = threading.Thread(target=signal.raise_signal, args=(signal.{name},))
    other.start()
    stopped.wait()
    other.join()
assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("ended")
"""


def test_a_signal_comes_while_the_main_thread_holds_what_stopping_needs() -> None:
    """It is neither lost nor waited for by the thread that it interrupts; nothing is left behind.

    Nor is one lost that the kernel gives to another thread, while the main thread waits.
    """
    for name in ("SIGTERM", "SIGINT"):
        process = ended([sys.executable, "-c", _PROGRAM.format(name=name)])
        assert (process.returncode, process.stdout) == (0, "ended\n"), process.stderr
