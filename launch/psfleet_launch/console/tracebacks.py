"""Tracebacks in what a worker writes, told in a line each; the worker's log has them whole."""

from psfleet_launch.console.failure_report import CHAINS, HEADER, find_cause

__all__ = ["Tracebacks"]


class Tracebacks:
    """Takes the standard error of a script as it comes, and gives what the screen is to show of it.

    The last traceback is held until something follows it: the one that ends the process is told by the
    report of the job.

    Args:
        script: Of its frames the last one is named.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._partial = b""
        self._shown = False  # the beginning of the line has been given away
        self._block: list[bytes] = []
        self._told = False  # the block has its exception

    def feed(self, data: bytes) -> bytes:
        """What can be shown now."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        out = b"".join(self._take(line + b"\n") for line in lines)
        if self._partial and (self._shown or not self._may_belong(self._partial)):
            out += self.rest() + self._partial
            self._partial, self._shown = b"", True
        return out

    def rest(self) -> bytes:
        """What was held."""
        block, self._block, self._told = self._block, [], False
        if not block:
            return b""
        lines = b"".join(block).decode(errors="replace").splitlines()
        cause = find_cause(lines, self._script)
        return f"{cause.headline} ({cause.place or 'its traceback is in the log'})\n".encode()

    def _take(self, line: bytes) -> bytes:
        if self._shown:
            self._shown = False
            return line
        if line.rstrip(b"\r\n") == HEADER:
            held = self.rest() if self._told and not _is_chain(self._block) else b""
            self._block.append(line)
            self._told = False
            return held
        if not self._block:
            return line
        if self._told and not (line.strip() == b"" or _is_chain([line])):
            return self.rest() + line
        self._told = self._told or line[:1].strip() != b""
        self._block.append(line)
        return b""

    def _may_belong(self, partial: bytes) -> bool:
        """Whether the beginning of a line may belong to a traceback."""
        return HEADER.startswith(partial) or bool(self._block)


def _is_chain(block: list[bytes]) -> bool:
    """Whether the last line that says something leads over to another traceback."""
    said = [line.strip() for line in block if line.strip()]
    return bool(said) and said[-1] in CHAINS
