"""The log file of a server: records in the order in which they took effect, each with its checksums.

A comment below describes every byte. The checksum of a record's head continues the checksum of the head
before (the file header's for the first record). A missing, repeated or moved record is therefore detected.

A process that dies while it writes leaves an incomplete record at the end of the file. A machine that loses
power may also leave zeros in place of pages that were not written yet. Such a *torn tail* is cut off, because
its record was never acknowledged. (A file that was truncated or zeroed later looks the same and cannot be
distinguished.) Any other difference from the written bytes is damage, and the log is refused, as it is if a
whole record may stand behind the zeros.

Each snapshot begins a new file, named after the snapshot's number. Its header says where the file before it
ends (`after`), so that a missing file is detected. Once the snapshot is complete, the earlier files are
removed.

    server.0.log -> server.0.000007.log -> server.0.000008.log

Open this file to see how bytes reach the disk and are read back. `records.py` defines the records,
`recovery.py` replays them, and `log_place.py` handles full disks and the page cache.
"""

import contextlib
import io
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base import crash_points, files
from psfleet.core.base.errors import FrameError, LogError, NoRoom
from psfleet.core.base.files import reason, regular
from psfleet.core.base.logs import log_of
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.net.body import flat
from psfleet.core.net.frame import Part
from psfleet.core.net.message_codec import decode, encode
from psfleet_server.durability.log_place import PACE, LogDisk, PageCacheEvictor
from psfleet_server.durability.records import name_of

if TYPE_CHECKING:
    from psfleet.core.base.observability.tracing import Tracing

_log = log_of(__name__)

VERSION = 2
"""Version of the format of log files, and of the records that a standby receives."""

# A file, little-endian:
#
#   header  | "PSFLOG\r\n" | version u32 | length u32 | crc u32 | LogHeader as MessagePack, `length` bytes |
#   record  | length u64 | crc of the body u32 | kind u8 | 3 zeros | chain u32 | body, `length` bytes |
#   record  ...
#
# records.py defines the body of each kind. `kind` is at least 1: readers yield a file's header as kind 0.
# The zeros align `chain` to 4 bytes.
#
# chain = crc32(the 16 bytes before it), continued from the chain of the record before. A head can thus be
# trusted before its body is read. Without this check, a damaged `length` could look like a torn tail, and
# valid records would be cut off.
_MAGIC = b"PSFLOG\r\n"
_NUMBER = struct.Struct("<I")
_LENGTHS = struct.Struct("<III")
_FIELDS = struct.Struct("<QIB3x")
_CRC = struct.Struct("<I")
_HEAD = _FIELDS.size + _CRC.size
_PAGE = 4096  # bytes that a loss of power leaves written or unwritten together: a block of most file systems
_MOST_PARTS = 512  # buffers for one writev call; any number up to Linux's IOV_MAX, 1024, works


@dataclass(frozen=True)
class LogAfter:
    """End of one log file, at which the next file continues.

    Attributes:
        snapshot: Number of the snapshot that the next file begins with.
        chain: Checksum of the head of the last record in the file that ends here.
        end: Size of that file in bytes.
    """

    snapshot: int
    chain: int
    end: int


@dataclass(frozen=True)
class LogHeader:
    """Identity of the server that a log file belongs to. A server refuses a log with another identity.

    Attributes:
        job: Name of the job.
        server: Index of the server.
        servers: Number of servers in the fleet.
        workers: Number of workers that the fleet was started for.
        block: Number of values in a block of a dense table. Blocks are distributed over the servers.
        after: End of the earlier file that this one continues, or None for the first file.
    """

    job: str = ""
    server: int = 0
    servers: int = 0
    workers: int = 0
    block: int = 0
    after: LogAfter | None = None


# Stands for `after` in the first file, whose number is 0 and which continues no other file.
_FIRST = LogAfter(0, 0, 0)


class ServerLog:
    """Log of a server, open for appending.

    First call `recover` or `forget`. Then `append` records, and call `settle` before a reply depends on them.
    Only one thread at a time may append, which the shard's lock guarantees. Any thread may call `settle`.

    Args:
        path: First file of the log. It is created with `header` if the log has no file yet.
        header: Identity of the server. Files of another server are refused.
        fsync: If True, `settle` waits until records are on the disk. If False, records survive a crash of
            this process, but not of the machine.
        tell: Shows a line on the console.
        waits: Initial value of the attribute `waits`.

    Attributes:
        waits: If True, a write waits while the disk is full instead of raising NoRoom. A server that is
            starting waits, because it has no caller to report an error to.
        first: Path of the first file, which may have been removed since.
        path: Path of the file that is being written.
        tracing: Records spans of writes and syncs, or None without tracing.
        syncs: Histogram of the durations of syncs to the disk, in ns.
    """

    def __init__(
        self,
        path: Path,
        header: LogHeader,
        *,
        fsync: bool = False,
        tell: Callable[[str], None] = _log.warning,
        waits: bool = False,
    ) -> None:
        self.first = path
        self.tracing: Tracing | None = None
        self.waits = waits
        self._header = header
        self._fsync = fsync
        chaos = crash_points.chaos()
        self._disk_fault = None if chaos is None else chaos.DiskFullFault(header.server)
        self._disk = LogDisk(tell)
        if not self.files:
            self._patiently(lambda: self._create(path, header))
        for file in self.files.values():
            present = read_header(file)
            # `after` differs from file to file, and `chained` checks it.
            if replace(present, after=None) != header:
                raise LogError(
                    f"log {str(file)!r} is of {_words(present)}, this process is {_words(header)}; "
                    "use another folder"
                )
            self.path = file  # in the end the last one, which is written
        self._before = 0  # bytes of earlier files that this process has written
        # End of the last whole record in `path`, and the chain checksum of its head.
        self._end, self._chain = 0, 0
        self._file = os.open(self.path, os.O_RDWR)
        self.syncs = LatencyHistogram()
        # Held during a sync and while `turn` changes files, so that no sync uses a descriptor that was
        # closed.
        self._syncing = threading.Lock()
        self._synced = 0  # value of `end` when the last sync began: all before it is on the disk
        self._trail = PageCacheEvictor()

    @property
    def files(self) -> dict[int, Path]:
        """Present files of the log, as `files_of` returns them. Each access lists the log's folder."""
        return files_of(self.first)

    def recover(self, since: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Yield kind and body of every record. At the end, cut off an incomplete record and allow `append`.

        Read the iterator to its end: the incomplete record, which a crash has left, is cut off only then.

        Args:
            since: Number of the snapshot with whose file the records begin. 0 means the first file.

        Raises:
            LogError: The log is damaged.
        """
        for kind, body, end, chain in chained(self.first, since):
            self._end, self._chain = end, chain
            if kind:
                yield kind, body
        torn = os.fstat(self._file).st_size - self._end
        if torn:
            _log.warning(
                f"log {str(self.path)!r} ended in an incomplete record, which was never acknowledged: "
                f"its {torn:,} bytes are cut off"
            )
        self._cut_off(self._end)
        # Records of the earlier process may be in the page cache only: also those of the files before this
        # one, if that process had no fsync. New records build on them, so they must be as durable.
        if self._fsync:
            self._sync_earlier_files()
            self._sync()
        self._synced = self._end

    def forget(self) -> int:
        """Start with an empty log instead of calling `recover`.

        Returns:
            0, the number of records.
        """
        # Several files are those of an earlier standby in the same folder, which has followed cuts. `chained`
        # would read them before the new records. The newest goes first, so that no gap is left meanwhile.
        present_files = self.files
        if set(present_files) != {0}:
            for path in reversed(present_files.values()):
                path.unlink()
            self._patiently(lambda: self._create(self.first, self._header))
            os.close(self._file)
            self.path, self._file = self.first, os.open(self.first, os.O_RDWR)
        _, self._end, self._chain = _header(self.path)
        # Not synced here: the next `settle` syncs the shorter file together with its new records.
        self._cut_off(self._end)
        return 0

    def _cut_off(self, end: int) -> None:
        """Shorten the present file to `end` bytes. The next record is written there.

        If that fails, end the process. A torn record may then only be at the end of the file, where the next
        process cuts it off. If this process wrote on, every record behind the torn one would be unreadable.
        """
        try:
            os.ftruncate(self._file, end)
            os.lseek(self._file, end, os.SEEK_SET)
        except OSError as error:
            self._end_process(f"log {str(self.path)!r} cannot be shortened to {end} bytes", error)

    @property
    def end(self) -> int:
        """Position after the last record, in bytes. The position continues to rise when a new file begins."""
        return self._before + self._end

    @property
    def unsynced(self) -> int:
        """Number of bytes that are in the page cache but perhaps not on the disk. Always 0 without fsync."""
        return self.end - self._synced if self._fsync else 0

    def turn(self, number: int, kind: int, parts: Sequence[Part]) -> None:
        """Write the record of a cut, and continue in a new file, whose records follow snapshot `number`.

        The record is the last one in the old file: the snapshot contains all records up to it. Arguments of
        the record are those of `append`.

        Raises:
            LogError: The record cannot be written, or the file cannot be created. The log is unchanged.
        """
        path, end, chain = _numbered(self.first, number), self._end, self._chain
        self.append(kind, parts)
        header = replace(self._header, after=LogAfter(number, self._chain, self._end))
        with self._syncing:
            # Sync the old file first, for two reasons. Its descriptor is closed below, so `settle` can no
            # longer sync it. And if the new file reached the disk before the end of the old one, a loss of
            # power could leave a gap between the two files.
            if self._fsync:
                self._sync()
            # Created before the old file is closed: if that fails, the log simply goes on in the old file.
            # Not `_patiently`, because only this snapshot is then given up, but a wait would stop all pushes.
            try:
                self._create(path, header)
                file = os.open(path, os.O_RDWR)
            except (LogError, OSError) as error:
                # The shard gives the cut up, so a replay must not know it either. Nor may a replay find the
                # new file, because the next record goes to the old one.
                try:
                    path.unlink(missing_ok=True)
                except OSError as unlink_error:
                    # The two files fit together as they are, so the next process can read them.
                    if path.is_file():
                        self._end_process(f"log {str(path)!r} cannot be removed", unlink_error)
                self._sync_removal(path)
                self._cut_off(end)
                self._end, self._chain = end, chain
                self._synced = min(self._synced, self.end)
                # At once: the sync above has put the cut on the disk. The next record is written over it, and
                # after a loss of power a file with a part of each would be read as damaged.
                if self._fsync:
                    self._sync()
                if isinstance(error, LogError):
                    raise
                failure = f"log {str(path)!r} cannot be opened"
                raise self._disk.failed(failure, error, 0) from None
            os.close(self._file)
            self._file = file
            self._before += self._end
            _, self._end, self._chain = _header(path)
            os.lseek(file, self._end, os.SEEK_SET)
            # `_create` has synced the new file, which has only its header so far.
            self.path, self._synced = path, self.end
        crash_points.reach("turned")

    def shorten(self, number: int) -> None:
        """Remove the files before the file of snapshot `number`. Call it when the snapshot is complete."""
        # No such file if this log was begun after the cut, as by a new standby or after a move of rows. Its
        # other files do not belong to the snapshot.
        present_files = self.files
        if number not in present_files:
            return
        # Oldest first: if this process dies before the last one is removed, the remaining files are still
        # consecutive. The folder is not synced: a file that a loss of power brings back is older than the
        # snapshot with which a replay begins, and is not read.
        for number_of_file, path in present_files.items():
            if number_of_file < number:
                path.unlink()
                crash_points.reach("shortened")

    def append(self, kind: int, parts: Sequence[Part]) -> None:
        """Write a record to the file. `settle` makes the record durable.

        Without `settle` the record survives a crash of this process, but not of the machine.

        Args:
            kind: Kind of the record, at least 1.
            parts: Body of the record, as buffers that are written one after the other without joining them.

        Raises:
            NoRoom: The disk is full. The log is unchanged.
            LogError: The record could not be written. The log is unchanged.
        """
        trace = self.tracing
        span = None if trace is None else trace.child(f"log {name_of(kind)}")
        try:
            views = [flat(part) for part in parts]
            length, crc = 0, 0
            for view in views:
                length, crc = length + view.nbytes, zlib.crc32(view, crc)
            fields = _FIELDS.pack(length, crc, kind)
            chain = zlib.crc32(fields, self._chain)
            head = memoryview(fields + _CRC.pack(chain))
            crash_points.reach("append")
            crash_points.reach("tear", lambda: os.write(self._file, b"".join((head, *views))[:-1]))
            self._patiently(lambda: self._append([head, *views]))
            self._end, self._chain = self._end + _HEAD + length, chain
            self._trail.follow(self._file, self._end, _HEAD + length)
            crash_points.reach("appended")
        finally:
            if span is not None:
                span.end()

    def _append(self, views: list[memoryview]) -> None:
        try:
            if self._disk_fault is not None:
                self._disk_fault.check()
            _write(views, self._file)
        except OSError as error:
            # Part of the record may be in the file. Cut that part off. Otherwise the next record would follow
            # a torn one, and everything behind the torn record would be read as damage.
            self._cut_off(self._end)
            size = sum(view.nbytes for view in views)
            failure = f"log {str(self.path)!r} cannot be written"
            raise self._disk.failed(failure, error, size) from None
        self._disk.took(f"log {str(self.path)!r}", self.path)

    def _create(self, path: Path, header: LogHeader) -> None:
        """Create a log file with only a header. The file gets its name once it is complete."""
        body = encode(header)
        content = _MAGIC + _LENGTHS.pack(VERSION, len(body), _checksum(VERSION, body)) + body
        try:
            files.replace(path, lambda to: _write_private(to, content))
        except OSError as error:
            failure = f"log {str(path)!r} cannot be made"
            raise self._disk.failed(failure, error, len(content)) from None

    def _patiently(self, step: Callable[[], None]) -> None:
        """Call `step`. If `waits` is set, retry while the disk is full."""
        while True:
            try:
                return step()
            except NoRoom:
                if not self.waits:
                    raise
            time.sleep(PACE)

    def is_settled(self, end: int) -> bool:
        """Return True if `settle` would return at once."""
        return not self._fsync or self._synced >= end

    def settle(self, end: int) -> None:
        """Wait until the log up to position `end` is durable. Without fsync this returns at once.

        Threads that call this during a sync share the next sync: the first thread to get the lock syncs
        everything written by then, and the other threads find their `end` covered.
        """
        if self.is_settled(end):
            return
        span = None if self.tracing is None else self.tracing.child("log sync")
        try:
            with self._syncing:
                if self._synced >= end:
                    return
                # Read before the sync: records that are appended during it may not be on the disk afterwards.
                position, began = self.end, time.perf_counter_ns()
                self._sync()
                self._synced = position
                duration = time.perf_counter_ns() - began
                self.syncs.counts[duration.bit_length()] += 1
                self.syncs.total += duration
        finally:
            if span is not None:
                span.end()

    def _sync(self) -> None:
        """Wait until the present file is on the disk. If that fails, end the process."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            # It is unknown which bytes the disk holds. A second sync would not tell: after an error the
            # kernel may mark the lost pages as clean, so that the next sync succeeds without writing them.
            # So the process ends. Dropped from the page cache, the lost pages do not pass for records on the
            # disk when the next process reads the log and acknowledges what it finds.
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
            self._end_process(f"log {str(self.path)!r} cannot be synced to disk", error)

    def _sync_earlier_files(self) -> None:
        """Wait until the files before the present one are on the disk. If that fails, end the process."""
        for path in self.files.values():
            if path != self.path:
                try:
                    files.sync(path)
                except OSError as error:
                    self._end_process(f"log {str(path)!r} cannot be synced to disk", error)

    def _end_process(self, failure: str, error: OSError) -> NoReturn:
        """End this process at once, because the file no longer certainly has what the log should have."""
        _log.critical(f"{failure}: {error.strerror}")
        os._exit(1)

    def _sync_removal(self, path: Path) -> None:
        """Wait until the removal of a file's name is on the disk. If that fails, end the process.

        Call it before the present file is shortened. After a loss of power between the two, a replay would
        find a new file that does not begin where the file before it ends, and refuse the log.
        """
        if not self._fsync:
            return
        try:
            files.sync(path.absolute().parent)
        except OSError as error:
            self._end_process(f"the removal of log {str(path)!r} cannot be synced to disk", error)

    def remove(self) -> None:
        """Close the log and delete its files."""
        self.close()
        for path in self.files.values():
            path.unlink()

    def close(self) -> None:
        """Close the file without a sync.

        `settle` has already synced the records of every reply that was sent.
        """
        self._trail.close()
        os.close(self._file)


def files_of(first: Path) -> dict[int, Path]:
    """Return the existing files of a log.

    Args:
        first: Path of the log's first file, which may have been removed.

    Returns:
        Paths in ascending order by the number of the snapshot that begins each file. The first file of a log
        has number 0.
    """
    name = re.compile(re.escape(first.stem) + r"\.(\d{6,})" + re.escape(first.suffix))
    # A pattern for glob cannot say "six digits or more", and would interpret special characters of the name.
    matches = [(name.fullmatch(path.name), path) for path in first.parent.glob("*")]
    numbered = {int(match[1]): path for match, path in matches if match}
    return dict(sorted({**({0: first} if first.exists() else {}), **numbered}.items()))


def chained(first: Path, since: int = 0) -> Iterator[tuple[int, memoryview, int, int]]:
    """Yield (kind, body, end offset in the file, chain checksum) for each record in all files of a log.

    Args:
        first: Path of the log's first file.
        since: Number of the snapshot with whose file the records begin. 0 means the first file.

    Raises:
        LogError: A file is damaged, or does not continue where the file before it ends.
    """
    # Position and chain of the last record of the file before. Only the last file may have a torn tail: a
    # file that was cut elsewhere does not end where the next file's header says.
    last: tuple[int, int] | None = None
    for number, path in files_of(first).items():
        if number < since:
            continue
        after = read_header(path).after or _FIRST
        # The header repeats the number in the file's name, so that a renamed file is detected too.
        if after.snapshot != number or last not in (None, (after.end, after.chain)):
            raise LogError(
                f"log {str(path)!r} does not go on where the file before it ends; restore the "
                "files, or start the job again from a snapshot"
            )
        for record in records(path):
            last = record[2], record[3]
            yield record


def _numbered(first: Path, number: int) -> Path:
    return first.with_name(f"{first.stem}.{number:06d}{first.suffix}")


def read_header(path: Path) -> LogHeader:
    """Read the header of a log file, which identifies the server and its job.

    Raises:
        LogError: The file is not a log, has another version, or its header is damaged.
    """
    return _header(path)[0]


def records(path: Path) -> Iterator[tuple[int, memoryview, int, int]]:
    """Yield (kind, body, end offset in the file, chain checksum) for the header and each complete record.

    The header comes first, with kind 0 and an empty body. All bytes after the last yielded record belong to
    an incomplete record, which a crash has left. Bodies begin at multiples of 8 bytes in memory, so that
    their arrays are aligned.

    Raises:
        LogError: The file is damaged.
    """
    _, end, chain = _header(path)
    size = path.stat().st_size
    yield 0, memoryview(b""), end, chain
    with regular(path) as raw, io.BufferedReader(raw) as file:  # type: ignore[type-var]
        file.seek(end)
        while size - end >= _HEAD:
            head = file.read(_HEAD)
            length, crc, kind = _FIELDS.unpack_from(head)
            chain = zlib.crc32(head[: _FIELDS.size], chain)
            # A head of zeros is never valid, not even if its chain happens to be 0.
            if _CRC.unpack_from(head, _FIELDS.size) != (chain,) or kind == 0:
                # A process that dies while it writes a head leaves fewer bytes than a head has. So a torn
                # head lacks its page, or the second of its two pages. Only zeros may follow it, because
                # without its length it is unknown whether other bytes belong to this record.
                second_page = -end % _PAGE
                if _is_zero(file, head[second_page if second_page < _HEAD else 0 :]):
                    return
                raise _damaged(path, end)
            # The head is valid, so its length is correct, and the body must be torn.
            if length > size - end - _HEAD:
                return
            body = np.empty(length, np.uint8)
            file.readinto(body.data)
            if zlib.crc32(body.data) != crc:
                # Only the last record: records behind it may be acknowledged, and then this one is too.
                if _lacks_page(body, end + _HEAD) and _is_zero(file):
                    return
                raise _damaged(path, end)
            end += _HEAD + length
            yield kind, body.data, end, chain


def _header(path: Path) -> tuple[LogHeader, int, int]:
    """Read a file's header.

    Returns:
        The header, the offset of its end in the file, and its checksum, which begins the chain of checksums.
    """
    try:
        with regular(path) as file:
            start = file.read(len(_MAGIC) + _LENGTHS.size)
            if len(start) < len(_MAGIC) + _LENGTHS.size or not start.startswith(_MAGIC):
                raise LogError(f"{str(path)!r} is no log of a server")
            version, length, crc = _LENGTHS.unpack_from(start, len(_MAGIC))
            # Limited, because a damaged `length` may ask for up to 4 GiB. No header comes near 1 MiB.
            body = file.read(min(length, 1 << 20))
    except (OSError, ValueError) as error:  # ValueError: no name of a file
        raise LogError(f"log {str(path)!r} cannot be read: {reason(error)}") from None
    # Before the version is read: a damaged version must not be reported as one of another psfleet.
    if len(body) != length or _checksum(version, body) != crc:
        raise _damaged(path, 0)
    try:
        if version != VERSION:
            raise FrameError(f"it has version {version}, and this psfleet reads version {VERSION}")
        return decode(LogHeader, body, "header of a log"), len(start) + length, crc
    except FrameError as error:
        raise LogError(
            f"log {str(path)!r} cannot be read: {error}; read it with the psfleet version that wrote it"
        ) from None


def _checksum(version: int, body: bytes) -> int:
    # Needs no length: with a damaged one another body is read, which has another checksum.
    return zlib.crc32(body, zlib.crc32(_NUMBER.pack(version)))


def _words(header: LogHeader) -> str:
    """Describe, for messages, the server that the log belongs to."""
    return (
        f"server {header.server} of {header.servers} of job {header.job!r} with {header.workers} "
        f"workers and blocks of {header.block} values"
    )


def _write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, because the log will contain all data of the server."""
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)


def _write(views: list[memoryview], file: int) -> None:
    """Write all buffers, in as many writev calls as necessary."""
    views = [*views]  # the caller's list stays as it is
    while views:
        size = os.writev(file, views[:_MOST_PARTS])
        # writev may write only a part: drop the buffers that are written, and cut the one that is partly
        # written.
        while views and size >= views[0].nbytes:
            size -= views.pop(0).nbytes
        if size:
            views[0] = views[0][size:]


def _lacks_page(body: NDArray[np.uint8], offset: int) -> bool:
    """Return True if `body`, at `offset` in its file, has only zeros on a whole page or on its last one."""
    # The part before the first whole page is on the page of the record's head, which was not lost: the head
    # was valid.
    starts = range(-offset % _PAGE, len(body), _PAGE)
    return not all(body[start : start + _PAGE].any() for start in starts)


def _is_zero(file: Any, head: bytes = b"") -> bool:
    """Return True if `head` and everything behind it in the file are zeros."""
    while not any(head):
        head = file.read(1 << 20)
        if not head:
            return True
    return False


def _damaged(path: Path, at: int) -> LogError:
    return LogError(
        f"log {str(path)!r} is damaged at byte {at}; restore the file, or start the job "
        "again from a snapshot"
    )
