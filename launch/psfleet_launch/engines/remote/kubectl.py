"""The user's kubectl: asked, or followed while it writes."""

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, Any

from psfleet.errors import ConfigError
from psfleet_launch.job.spawn import spawn

__all__ = ["Kubectl", "KubectlStream", "Objects"]

_PATIENCE = "--request-timeout=1m"
_MISSING = (
    "--engine kubernetes needs kubectl, which is not on the path; install it, or write the files of the job "
    "with --render"
)


class Kubectl:
    """Runs kubectl.

    Args:
        options: Go before all other arguments.
        selector: Woken by the streams that are followed.
    """

    def __init__(self, options: Sequence[str], selector: selectors.BaseSelector) -> None:
        self._command = ["kubectl", *options]
        self._selector = selector

    def ask(self, *words: str) -> str:
        """What kubectl answers.

        Raises:
            ConfigError: It fails; the text is its own.
        """
        try:
            done = subprocess.run(
                [*self._command, *words, _PATIENCE], capture_output=True, text=True, check=False
            )
        except FileNotFoundError:
            raise ConfigError(_MISSING) from None
        if done.returncode:
            raise ConfigError(f"kubectl {words[0]}: {_last_line(done.stderr, done.returncode)}")
        return done.stdout

    def start(self, log: IO[bytes], *words: str) -> "subprocess.Popen[bytes]":
        """Start kubectl, which writes to this log."""
        return spawn([*self._command, *words], os.environ, log, piped=False)

    def follow(
        self, words: Sequence[str], take: Callable[[bytes], None], end: "Ended"
    ) -> "KubectlStream":
        """Start kubectl and hear what it writes.

        Args:
            take: Gets what it writes to standard output.
            end: Gets the stream, its exit code and its last line on standard error.
        """
        return KubectlStream([*self._command, *words], self._selector, take, end)


class KubectlStream:
    """A kubectl that runs, and dies with the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        take: Callable[[bytes], None],
        end: "Ended",
    ) -> None:
        self._process = spawn(command, os.environ, None, piped=True)
        self._selector = selector
        self._take = take
        self._end = end
        self._complaint = b""
        self._open = 2
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            selector.register(stream, selectors.EVENT_READ, partial(self._read, stream))

    def _read(self, stream: IO[bytes]) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            self._let_go(stream)
        elif stream is self._process.stdout:
            self._take(data)
        else:
            self._complaint += data
        if not self._open:
            code = self._process.wait()
            self._end(self, code, _last_line(self._complaint.decode(errors="replace"), code))

    def _let_go(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        stream.close()
        self._open -= 1

    def close(self) -> None:
        """End it; nobody hears of that."""
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            if not stream.closed:
                self._let_go(stream)
        self._process.kill()
        self._process.wait()


Ended = Callable[[KubectlStream, int, str], None]


class Objects:
    """Takes a stream of JSON objects apart, wherever its pieces end."""

    def __init__(self) -> None:
        self._rest = b""
        self._decoder = json.JSONDecoder()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The objects that are complete now."""
        self._rest += data
        while text := self._rest.decode(errors="ignore").lstrip():
            try:
                found, end = self._decoder.raw_decode(text)
            except ValueError:
                return
            self._rest = self._rest.lstrip()[len(text[:end].encode()) :]
            yield found


def _last_line(said: str, code: int) -> str:
    return ([f"it has ended with exit code {code}", *said.strip().splitlines()])[-1]
