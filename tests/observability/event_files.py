"""Event files as TensorBoard reads them: records with a length and checksums, each an Event."""

import struct
from pathlib import Path


def scalars(folder: Path) -> list[tuple[str, int, float]]:
    """Tag, step and value of each scalar in the files of a folder that are written to the end."""
    from tensorboardX.proto.event_pb2 import Event  # it imports torch

    scalars_read = []
    for path in sorted(folder.glob("*.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at + 16 <= len(content):
            [size] = struct.unpack_from("<Q", content, at)
            if at + 16 + size > len(content):
                break  # it is being written
            record = content[at + 12 : at + 12 + size]
            assert struct.unpack_from("<I", content, at + 8) == (_masked(content[at : at + 8]),)
            assert struct.unpack_from("<I", content, at + 12 + size) == (_masked(record),)
            event = Event.FromString(record)
            scalars_read += [(one.tag, event.step, one.simple_value) for one in event.summary.value]
            at += 16 + size
    return scalars_read


def _masked(content: bytes) -> int:
    """The checksum of the TFRecord format."""
    from tensorboardX.crc32c import crc32c

    plain: int = crc32c(content)
    return ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF
