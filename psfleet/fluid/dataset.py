"""Training from text files in the reference's multi-slot format.

A line is one sample: for each variable, in the order of `set_use_var`, the number of its values and
then the values. With x of shape [-1, 1] and y of shape [-1, 2]:

    1 7 2 0.5 0.25
"""

import random
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from psfleet.errors import ConfigError, ShapeError, UsageError
from psfleet.program.operation import Array
from psfleet.program.shapes import size_of
from psfleet.program.variable import Variable

__all__ = ["DatasetFactory", "FileDataset", "InMemoryDataset"]

Sample = list[Array]

_QUOTED = re.compile(r"'[^']*'")  # what no shell would change
_SHELL_SIGNS = frozenset("|&;<>()$`\\*?[]{}~#!\n")


class FileDataset:
    """Batches read from files while training runs: FileInstantDataset and QueueDataset."""

    def __init__(self) -> None:
        self._variables: list[Variable] = []
        self._batch_size = 1
        self._files: list[str] = []
        self._command = "cat"
        self._arguments: str | list[str] = [self._command]

    def set_use_var(self, var_list: Sequence[Variable]) -> None:
        """The data variables, in the order of a line's slots."""
        for variable in var_list:
            if size_of(variable.shape[1:]) is None:
                raise ShapeError(
                    f"{variable.name!r} {variable.shape}: a slot needs known extents "
                    "behind the batch axis"
                )
        self._variables = list(var_list)

    def set_batch_size(self, batch_size: int) -> None:
        """Samples per step; the last batch may have fewer."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; it must be at least 1")
        self._batch_size = batch_size

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """The files, in the order in which they are read."""
        if isinstance(filelist, str):
            raise ConfigError(f"filelist is the string {filelist!r}; it must be a list of files")
        self._files = [str(name) for name in filelist]

    def set_pipe_command(self, pipe_command: str) -> None:
        """A command that each file is piped through; what it prints is read.

        It runs with the rights of this process. It is a program and its arguments, unless it has signs of the
        shell (a pipe, a variable, a pattern, ...): then a shell runs it, as in the reference.

        Raises:
            ConfigError: It is empty, or has an opening quote only.
        """
        self._command, self._arguments = pipe_command, _arguments(pipe_command)

    def set_thread(self, thread_num: int) -> None:
        """Accepted for the reference's sake: one thread reads."""

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Feeds of batches.

        Raises:
            UsageError: No variables were set, or a line is not in the format; it is named.
        """
        if not self._variables:
            raise UsageError("the dataset has no variables; call set_use_var first")
        batch: list[Sample] = []
        for sample in self._samples():
            batch.append(sample)
            if len(batch) == self._batch_size:
                yield self._feed(batch)
                batch = []
        if batch:
            yield self._feed(batch)

    def _samples(self) -> Iterator[Sample]:
        for name in self._files:
            with self._open(name) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield self._parse(line.split(), f"{name}:{number}")

    @contextmanager
    def _open(self, name: str) -> Iterator[IO[str]]:
        if not Path(name).is_file():
            raise UsageError(f"dataset file {name!r} does not exist")
        if self._command == "cat":
            with open(name, errors="replace") as lines:  # what is no text is no number
                yield lines
            return
        with open(name, "rb") as source, self._pipe(source) as pipe:
            assert pipe.stdout is not None
            yield pipe.stdout
        if pipe.returncode:
            raise UsageError(
                f"pipe command {self._command!r} failed on {name!r} with exit code "
                f"{pipe.returncode}"
            )

    def _pipe(self, source: IO[bytes]) -> "subprocess.Popen[str]":
        try:
            return subprocess.Popen(
                self._arguments,
                shell=isinstance(self._arguments, str),
                stdin=source,
                stdout=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise UsageError(
                f"pipe command {self._command!r} cannot run ({error.strerror}); name a program"
            ) from None

    def _parse(self, words: list[str], where: str) -> Sample:
        sample, at = [], 0
        for variable in self._variables:
            size = size_of(variable.shape[1:])
            count = words[at] if at < len(words) else "nothing"
            if count != str(size) or at + 1 + int(size or 0) > len(words):
                raise UsageError(
                    f"{where}: slot {variable.name!r} says {count}, and it must be "
                    f"{size} followed by as many values"
                )
            at += 1 + int(size or 0)
            sample.append(_values(variable, words[at - int(size or 0) : at], where))
        if at != len(words):
            raise UsageError(f"{where}: {len(words) - at} words are left after the last slot")
        return sample

    def _feed(self, batch: list[Sample]) -> dict[str, Array]:
        return {
            variable.name: np.stack([sample[i] for sample in batch])
            for i, variable in enumerate(self._variables)
        }


class InMemoryDataset(FileDataset):
    """Batches from samples that were all read before, in an order that can be shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: list[Sample] | None = None

    def load_into_memory(self) -> None:
        """Read the files."""
        self._loaded = list(super()._samples())

    def local_shuffle(self, seed: int = 0) -> None:
        """Put the samples in an order that depends on nothing but the seed and the last order."""
        random.Random(seed).shuffle(self._memory())

    def release_memory(self) -> None:
        """Forget the samples."""
        self._loaded = None

    def get_memory_data_size(self) -> int:
        """The number of samples."""
        return len(self._memory())

    def _memory(self) -> list[Sample]:
        if self._loaded is None:
            raise UsageError("the dataset is not in memory; call load_into_memory() first")
        return self._loaded

    def _samples(self) -> Iterator[Sample]:
        yield from self._memory()


class DatasetFactory:
    """Makes datasets by their names in the reference."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> FileDataset:
        """A FileInstantDataset, QueueDataset or InMemoryDataset."""
        match datafeed_class:
            case "FileInstantDataset" | "QueueDataset":
                return FileDataset()
            case "InMemoryDataset":
                return InMemoryDataset()
        raise ConfigError(
            f"dataset {datafeed_class!r} is unknown; use FileInstantDataset, "
            "QueueDataset or InMemoryDataset"
        )


def _arguments(command: str) -> str | list[str]:
    """The program and its arguments; the text as it is where only a shell can read it."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"pipe command {command!r} cannot be read: {error}") from None
    if not words:
        raise ConfigError(
            f"pipe command is {command!r}; name a program, or cat for the files as they are"
        )
    signs = _SHELL_SIGNS.intersection(_QUOTED.sub("", command))
    sets_a_variable = "=" in words[0]
    return command if signs or sets_a_variable else words


def _values(variable: Variable, words: list[str], where: str) -> Array:
    convert = int if variable.dtype.kind == "i" else float
    try:
        flat = np.array([convert(word) for word in words], variable.dtype)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{where}: slot {variable.name!r}: {error}") from None
    return flat.reshape([int(n or 0) for n in variable.shape[1:]])
