"""Paddle's datasets: text files in multi-slot format for `exe.train_from_dataset`, and generators of such
text.

They exist so that Paddle scripts run unchanged. New scripts use `fleet.dataset` with the sources of
psfleet.data (ParquetFiles, TextFiles), which also continues after a restart.

In the multi-slot format a line is one sample. For each variable, in the order of `set_use_var`, the line
has the number of values (the *slot*'s size) and then the values. With x of shape [-1, 1] and y of shape
[-1, 2]:

    1 7 2 0.5 0.25          x = 7, y = 0.5, 0.25

FileDataset reads the files during training. InMemoryDataset reads them before training and can shuffle.
DataGenerator is the base class of programs that convert lines of any format, for `set_pipe_command`.
"""

import itertools
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.base.validation.annotations import FilePath, PositiveInt, checked
from psfleet.core.graph.program.operation import Array, size_of
from psfleet.core.graph.program.variable import Variable
from psfleet.fleet.fleet import process_fleet
from psfleet.fleet.sums import Util

SlotValues = list[Array]
"""Sample read from a line: one array for each slot."""
Sample = list[tuple[str, list[Any]]]
"""Sample to print as a line: name and values of each slot."""
S = TypeVar("S")
_EXCHANGED = 65536  # samples of all workers in one collective

_ONLY = {"input_type": 0, "fs_name": "", "fs_ugi": "", "download_cmd": "cat"}
_QUOTED = re.compile(r"'[^']*'")  # text in single quotes, which a shell leaves as it is
_SHELL_SIGNS = frozenset("|&;<>()$`\\*?[]{}~#!\n")


@checked
class FileDataset:
    """Dataset of multi-slot text files.

        dataset = fleet.QueueDataset()
        dataset.init(batch_size=128, use_var=[x, y], pipe_command="python clicks.py")
        dataset.set_filelist(["part-0", "part-1"])
        exe.train_from_dataset(program, dataset)

    The files are read during training. Paddle calls this class QueueDataset.
    """

    def __init__(self) -> None:
        self._variables: list[Variable] = []
        self._batch_size = 1
        self._files: list[str] = []
        self._command = "cat"
        self._arguments: str | list[str] = [self._command]

    def set_use_var(self, var_list: Sequence[Variable]) -> None:
        """Set the variables that a line has values for, in the order of the line."""
        for variable in var_list:
            if size_of(variable.shape[1:]) is None:
                raise ShapeError(
                    f"{variable.name!r} {variable.shape}: a slot needs known extents "
                    "behind the batch axis"
                )
        self._variables = list(var_list)

    def set_batch_size(self, batch_size: PositiveInt) -> None:
        """Set the number of samples in a step. The last batch may have fewer."""
        self._batch_size = batch_size

    def set_filelist(self, filelist: Sequence[FilePath]) -> None:
        """Set the files, in the order in which they are read."""
        self._files = [str(name) for name in filelist]

    def set_pipe_command(self, pipe_command: str) -> None:
        """Set a command that converts each file to the multi-slot format.

        The command is run once for each file. It gets the file on its standard input, and the dataset reads
        its output. The command has the rights of this process. If it contains shell syntax (a pipe, a
        variable, a pattern, ...), a shell runs it, as in Paddle. Otherwise the program is started directly.

        Raises:
            ConfigError: The command is empty, or a quote is not closed.
        """
        self._command, self._arguments = pipe_command, _arguments(pipe_command)

    def set_thread(self, thread_num: PositiveInt) -> None:
        """Do nothing. Accepted because Paddle has it; here one thread reads."""

    def init(self, **settings: Any) -> None:
        """Change several settings at once.

        Args:
            settings: `batch_size`, `thread_num`, `use_var` and `pipe_command`, as in `set_batch_size` and the
                other setters. Paddle's `input_type`, `fs_name`, `fs_ugi` and `download_cmd` are accepted
                only with the values for local files.

        Raises:
            ConfigError: A name is unknown, or a value is not supported.
        """
        setters: dict[str, Callable[[Any], None]] = {
            "batch_size": self.set_batch_size,
            "thread_num": self.set_thread,
            "use_var": self.set_use_var,
            "pipe_command": self.set_pipe_command,
        }
        names = [*setters, *_ONLY]
        owner = type(self).__name__
        for name, value in settings.items():
            if name not in names:
                raise ConfigError(f"{owner} has no setting {name!r}; it has {', '.join(names)}")
            if name in _ONLY and value != _ONLY[name]:
                raise ConfigError(
                    f"{owner} {name} is {value!r}; it must be {_ONLY[name]!r}: files of this host are read, "
                    "one sample a line"
                )
        for name in setters.keys() & settings.keys():
            setters[name](settings[name])

    def update_settings(self, **settings: Any) -> None:
        """Change several settings at once. Takes the same arguments as `init`."""
        self.init(**settings)

    def __iter__(self) -> Iterator[dict[str, Array]]:
        """Yield the batches as feeds: one array for each variable, by the variable's name.

        Raises:
            UsageError: No variables were set, or a line is not in multi-slot format. The error names the
                line.
        """
        if not self._variables:
            raise UsageError("the dataset has no variables; call set_use_var first")
        yield from map(self._feed, _batches(self._samples(), self._batch_size))

    def _samples(self) -> Iterator[SlotValues]:
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
            # A byte that is not valid text becomes a replacement character, and `_parse` reports the word.
            with open(name, errors="replace") as lines:
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

    def _parse(self, words: list[str], where: str) -> SlotValues:
        sample, at = [], 0
        for variable in self._variables:
            size = size_of(variable.shape[1:]) or 0
            count = words[at] if at < len(words) else "nothing"
            if count != str(size) or at + 1 + size > len(words):
                raise UsageError(
                    f"{where}: slot {variable.name!r} says {count}, and it must be "
                    f"{size} followed by as many values"
                )
            at += 1 + size
            sample.append(_values(variable, words[at - size : at], where))
        if at != len(words):
            raise UsageError(f"{where}: {len(words) - at} words are left after the last slot")
        return sample

    def _feed(self, batch: list[SlotValues]) -> dict[str, Array]:
        return {
            variable.name: np.stack([sample[i] for sample in batch])
            for i, variable in enumerate(self._variables)
        }


@checked
class InMemoryDataset(FileDataset):
    """Dataset that reads all samples into memory before training.

        dataset.load_into_memory()
        dataset.global_shuffle()  # on every worker
        exe.train_from_dataset(program, dataset)

    Samples in memory can be shuffled, also between workers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loaded: list[SlotValues] | None = None
        self._loading: Future[None] | None = None

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Read the files into memory, and call `local_shuffle` if `is_shuffle` is True."""
        self._loaded = list(super()._samples())
        if is_shuffle:
            self.local_shuffle()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Start to read the files in another thread. Call `wait_preload_done` before you use the dataset.

        Args:
            thread_num: Ignored. Accepted because Paddle has it.
        """
        reader = ThreadPoolExecutor(1, "psfleet-preload")
        self._loading = reader.submit(self.load_into_memory)
        reader.shutdown(wait=False)  # the thread ends once it has read the files

    def wait_preload_done(self) -> None:
        """Wait until the files are read.

        Raises:
            UsageError: `preload_into_memory` was not called, or a file cannot be read.
        """
        if self._loading is None:
            raise UsageError("the dataset is not being read; call preload_into_memory() first")
        loading, self._loading = self._loading, None
        loading.result()

    def local_shuffle(self, seed: int | None = 0) -> None:
        """Shuffle this worker's samples. The same seed and the same previous order give the same new
        order."""
        random.Random(seed).shuffle(self._memory())

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12, seed: int = 0) -> None:
        """Shuffle the samples of all workers together, and distribute them evenly over the workers.

        Every worker must call this. Afterwards the workers' numbers of samples differ by one at most. The
        same seed and the same previous orders give the same result.

        Args:
            fleet: Fleet of the workers, or None for psfleet.fleet.
            thread_num: Ignored. Accepted because Paddle has it.
            seed: Seed, the same on all workers.
        """
        util = _util(fleet)
        samples = self._memory()
        index, counts = util.worker_index, [int(n) for n in util.all_gather(np.int64(len(samples)))]
        total, first = sum(counts), sum(counts[:index])
        # All workers draw the same permutation: the new position of each sample. Worker i keeps the samples
        # at positions i, i + workers, ... Samples are exchanged by all-reduce sums: the worker that has the
        # sample adds its values, and every other worker adds zeros.
        new_positions = np.random.default_rng(seed).permutation(total)
        samples_by_position: dict[int, SlotValues] = {}
        for start in range(0, total, _EXCHANGED):
            stop = min(start + _EXCHANGED, total)
            columns = self._columns(samples, first, start, stop)
            sums = [util.all_reduce(column) for column in columns]
            for row in range(stop - start):
                if new_positions[start + row] % len(counts) == index:
                    samples_by_position[int(new_positions[start + row])] = [
                        column[row] for column in sums
                    ]
        self._loaded = [samples_by_position[number] for number in sorted(samples_by_position)]

    def _columns(self, samples: list[SlotValues], first: int, start: int, stop: int) -> list[Array]:
        """Return this worker's share of the samples `start` to `stop` - 1, one array for each variable.

        Samples are numbered over all workers. Samples of other workers are zeros in the result, so that the
        sum of all workers' results has the values of all samples.

        Args:
            first: Number of this worker's first sample.
            start: Number of the first sample to return.
            stop: Number of the last sample to return, plus 1.
        """
        columns = []
        own_numbers = range(max(start, first), min(stop, first + len(samples)))
        for i, variable in enumerate(self._variables):
            shape = stop - start, *(int(n or 0) for n in variable.shape[1:])
            columns.append(np.zeros(shape, variable.dtype))
            for number in own_numbers:
                columns[-1][number - start] = samples[number - first][i]
        return columns

    def slots_shuffle(self, slots: Sequence[str], seed: int = 0) -> None:
        """Shuffle the values of some variables between this worker's samples.

        An evaluation with shuffled values shows how much the model depends on these variables.

        Args:
            slots: Names of the variables.
            seed: Seed of the new order.
        """
        names = [variable.name for variable in self._variables]
        unknown = [slot for slot in slots if slot not in names]
        if isinstance(slots, str) or unknown:
            raise UsageError(
                f"slots is {slots!r}; it must be a list of variables of {', '.join(names)}"
            )
        samples, generator = self._memory(), random.Random(seed)
        for i in (names.index(slot) for slot in slots):
            values = [sample[i] for sample in samples]
            generator.shuffle(values)
            for sample, value in zip(samples, values, strict=True):
                sample[i] = value

    def release_memory(self) -> None:
        """Drop the samples and free their memory."""
        self._loaded = None

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """Return the number of this worker's samples or, if a fleet is passed, of all workers' samples.

        If a fleet is passed, every worker must call this.
        """
        count = len(self._memory())
        return count if fleet is None else int(_util(fleet).all_reduce(np.int64(count)))

    def get_shuffle_data_size(self, fleet: Any = None) -> int:
        """Return the number of samples, as `get_memory_data_size` does."""
        return self.get_memory_data_size(fleet)

    def _memory(self) -> list[SlotValues]:
        if self._loaded is None:
            raise UsageError("the dataset is not in memory; call load_into_memory() first")
        return self._loaded

    def _samples(self) -> Iterator[SlotValues]:
        yield from self._memory()


QueueDataset = FileDataset


@checked
class DatasetFactory:
    """Factory that creates a dataset from the name of its Paddle class."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> FileDataset:
        """Return a new dataset of class "FileInstantDataset", "QueueDataset" or "InMemoryDataset"."""
        match datafeed_class:
            case "FileInstantDataset" | "QueueDataset":
                return QueueDataset()
            case "InMemoryDataset":
                return InMemoryDataset()
        raise ConfigError(
            f"dataset {datafeed_class!r} is unknown; use FileInstantDataset, "
            "QueueDataset or InMemoryDataset"
        )


def _batches(samples: Iterator[S], size: int) -> Iterator[list[S]]:
    while batch := list(itertools.islice(samples, size)):
        yield batch


def _util(fleet: Any) -> Any:
    """Return the `util` of a fleet, or of psfleet.fleet if `fleet` is None."""
    util = getattr(process_fleet if fleet is None else fleet, "util", None)
    if not isinstance(util, Util):
        raise UsageError(f"fleet is {fleet!r}; it must be psfleet.fleet or a Fleet")
    return util


def _arguments(command: str) -> str | list[str]:
    """Return a command as a list of words, or unchanged if it needs a shell."""
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


class DataGenerator:
    """Base of programs that convert lines of any format to multi-slot lines. Define `generate_sample`.

        class Clicks(fleet.MultiSlotDataGenerator):
            def generate_sample(self, line):
                def samples():
                    user, label = line.split()
                    yield [("user", [int(user)]), ("label", [int(label)])]

                return samples

        Clicks().run_from_stdin()

    A dataset with `set_pipe_command("python clicks.py")` runs this program and reads its output.
    """

    def __init__(self) -> None:
        self._batch_size = 32

    @checked
    def set_batch(self, batch_size: PositiveInt) -> None:
        """Set the number of samples in each call of `generate_batch`."""
        self._batch_size = batch_size

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Sample | None]]:
        """Return a function that yields the samples of a line. A subclass must define this method.

        A sample is a list with (name, values) of each slot. If the function yields None, nothing is printed.

        Args:
            line: Line including its newline. `run_from_memory` passes None.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_sample(self, line)")

    def generate_batch(self, samples: list[Sample]) -> Callable[[], Iterable[Sample]]:
        """Return a function that yields the samples to print for a batch of samples.

        By default the batch is printed unchanged. A subclass may override this, for example to pad samples.
        """
        return lambda: samples

    def run_from_stdin(self) -> None:
        """Read lines from the standard input and print their samples."""
        self._print(sample for line in sys.stdin for sample in self.generate_sample(line)())

    def run_from_memory(self) -> None:
        """Print the samples of `generate_sample(None)`."""
        self._print(self.generate_sample(None)())

    def _print(self, samples: Iterable[Sample | None]) -> None:
        valid_samples = (sample for sample in samples if sample is not None)
        for batch in _batches(valid_samples, self._batch_size):
            for sample in self.generate_batch(batch)():
                sys.stdout.write(self._line(sample))

    def _line(self, sample: Any) -> str:
        words = []
        for slot in sample if isinstance(sample, list | tuple) else [sample]:
            if not (isinstance(slot, list | tuple) and len(slot) == 2 and slot[1]):
                raise UsageError(
                    f"{type(self).__name__}: a sample is {sample!r}; it must be a list of (name, values), "
                    "with at least one value each"
                )
            words += [str(len(slot[1])), *(self._word(slot[0], value) for value in slot[1])]
        return " ".join(words) + "\n"

    def _word(self, name: str, value: Any) -> str:
        raise NotImplementedError


class MultiSlotDataGenerator(DataGenerator):
    """Data generator for slots whose values are numbers."""

    def _word(self, name: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(
                f"{type(self).__name__}: {name!r} has the value {value!r}; it must be a number"
            )
        return str(value)


class MultiSlotStringDataGenerator(DataGenerator):
    """Data generator for slots whose values are strings, such as "0.5", which are printed unchanged."""

    def _word(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value.split()) != 1:
            raise UsageError(
                f"{type(self).__name__}: {name!r} has the value {value!r}; it must be one word"
            )
        return value
