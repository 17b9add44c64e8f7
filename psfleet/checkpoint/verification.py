"""Whether the files of a snapshot hold what its manifest says; checked before anything is loaded.

Checksums tell damage. This is for files whose checksums are right and whose content is not: written by
something else, or by somebody who means harm. Sizes are compared before memory is taken.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from psfleet.checkpoint.manifest import Manifest, ShardFile
from psfleet.errors import CheckpointError, PsfleetError
from psfleet.schema.table import TableSpec

__all__ = ["check_content", "damage_is_said"]

_WAITING = ("candidates", "candidate_counts", "candidate_touched")
_MOST = 2**62


@contextlib.contextmanager
def damage_is_said(path: str | Path) -> Iterator[None]:
    """Within, whatever a file's content leads to is a CheckpointError that names it."""
    try:
        yield
    except (PsfleetError, OSError):
        raise
    except Exception as error:  # there is no end to what a file can hold
        raise CheckpointError(f"{str(path)!r} is damaged: {error!r}") from None


def check_content(folder: Path, manifest: Manifest, opened: Sequence[tuple[Any, Any]]) -> None:
    """Compare the tensors and the state of every file with the manifest.

    Args:
        opened: Of each file of the manifest its tensors and its state.

    Raises:
        CheckpointError: Something is missing, or of another size, kind or range.
    """
    with damage_is_said(folder):
        if not manifest.files:
            raise ValueError("no files")
        for spec in manifest.tables:
            covered, everywhere = 0, True
            for entry, (tensors, state) in zip(manifest.files, opened, strict=True):
                if spec.name in entry.steps:
                    covered += _check_table(spec, entry, tensors)
                    _check_clock(*state["clocks"][spec.name])
                else:
                    everywhere = False  # it was being created
            if spec.kind == "dense" and (covered or everywhere) and covered != spec.size:
                raise ValueError(
                    f"table {spec.name!r} has {spec.size} values, the files hold {covered}"
                )


def _check_table(spec: TableSpec, entry: ShardFile, tensors: Any) -> int:
    """Returns how many values of a dense table the file holds."""
    if spec.kind == "dense":
        low, high = entry.ranges[spec.name]
        if not 0 <= low <= high <= spec.size:
            raise ValueError(f"table {spec.name!r}: range {low} to {high} of {spec.size} values")
        for slot in spec.slot_names:
            _expect(tensors, f"{spec.name}/{slot}", [high - low], "F32")
        return high - low
    count = tensors.get_slice(f"{spec.name}/ids").get_shape()[0]
    _expect(tensors, f"{spec.name}/ids", [count], "I64")
    width = spec.dim * len(spec.slot_names)
    _expect(tensors, f"{spec.name}/rows", [count, width], "F32")
    _expect(tensors, f"{spec.name}/touched", [count], "I64")
    if spec.scores:
        _expect(tensors, f"{spec.name}/scores", [count, spec.scores], "F32")
    _check_waiting(spec, tensors)
    return 0


def _check_waiting(spec: TableSpec, tensors: Any) -> None:
    names = [f"{spec.name}/{name}" for name in _WAITING]
    there = [name for name in names if name in tensors.keys()]  # noqa: SIM118  # not a dict
    if there and there != names:
        raise ValueError(f"{there} without the others of {names}")
    for name in there:
        _expect(tensors, name, tensors.get_slice(names[0]).get_shape()[:1], "I64")
    if (removed := f"{spec.name}/removed") in tensors.keys():  # noqa: SIM118  # not a dict
        _expect(tensors, removed, tensors.get_slice(removed).get_shape()[:1], "I64")


def _expect(tensors: Any, name: str, shape: Sequence[int], dtype: str) -> None:
    found = tensors.get_slice(name)
    if list(found.get_shape()) != list(shape) or found.get_dtype() != dtype:
        raise ValueError(
            f"tensor {name!r} is {found.get_dtype()} {found.get_shape()}, not {dtype} {shape}"
        )


def _check_clock(step: Any, shrinks: Any, ticks: Any) -> None:
    numbers = [step, *shrinks, *(int(at) for _, at in ticks), *(int(t) for t, _ in ticks)]
    if not all(isinstance(number, int) and 0 <= number <= _MOST for number in numbers):
        raise ValueError(f"clock {step!r}, {shrinks!r}, {ticks!r}")
