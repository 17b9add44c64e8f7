"""Large files of a snapshot: pages are gathered and written by a thread, around the page cache."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from psfleet.checkpoint import safetensors_files
from psfleet.checkpoint.safetensors_files import TensorWriter, digest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of 64 KiB are large, and buffers have 16 KiB."""
    monkeypatch.setattr(safetensors_files, "_LARGE", 64 << 10)
    monkeypatch.setattr(safetensors_files, "_BUFFER", 16 << 10)


def write(path: Path, content: dict[str, NDArray[np.int64]], seed: int) -> str:
    """Write tensors page by page, the pages of all tensors in any order; return the checksum."""
    dice = np.random.default_rng(seed)
    shapes = {name: (tensor.dtype, tensor.shape) for name, tensor in content.items()}
    left = dict(content)
    with TensorWriter(path, shapes, {"note": "n" * (seed % 50)}) as writer:
        while left:
            name = str(dice.choice(list(left)))
            count = int(dice.choice([0, 1, 7, 500, 513, 3000, 20_000]))
            writer.append(name, left[name][:count])
            left[name] = left[name][count:]
            if not len(left[name]):
                del left[name]
        checksum, size = writer.finish()
    assert size == path.stat().st_size
    return checksum


@pytest.mark.parametrize("block", [4096, 8], ids=["blocks", "larger blocks on the disk"])
@pytest.mark.parametrize("seed", range(6))
def test_a_large_file_has_all_bytes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seed: int, block: int
) -> None:
    """Wherever tensors and pages begin and end; also where a disk refuses such small blocks."""
    monkeypatch.setattr(safetensors_files, "_BLOCK", block)
    lengths = 30_000 + 511 * seed, 8192, 100, 9000 + seed, 0, 20_000
    content = {f"t{k}": np.arange(k, k + length) * 7 for k, length in enumerate(lengths)}
    path = tmp_path / "file"
    checksum = write(path, content, seed)
    assert checksum == hashlib.sha256(path.read_bytes()).hexdigest()
    for name, tensor in load_file(path).items():
        np.testing.assert_array_equal(tensor, content[name])


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 69_632, 81_920, 100_001])
@pytest.mark.parametrize("buffer", [16 << 10, 10_000])
def test_the_checksum_of_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, size: int, buffer: int, cached: bool
) -> None:
    """It is that of all bytes, also where the disk refuses buffers of that size."""
    monkeypatch.setattr(safetensors_files, "_BUFFER", buffer)
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(size).bytes(size))
    assert digest(path, cached=cached) == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_write_that_fails_in_the_thread_fails_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The disk is full. The error is raised when the file is finished, if not before. No thread is left."""
    before, write_now = threading.active_count(), os.pwrite

    def pwrite(file: int, content: memoryview, at: int) -> int:
        if threading.current_thread() is not threading.main_thread() and at > 50_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_now(file, content, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file", {"t": np.arange(12_000)}, 0)
    assert threading.active_count() == before
