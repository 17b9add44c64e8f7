"""Programs that turn lines into samples in the multi-slot format, for a dataset's pipe command."""

import sys
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

from psfleet.errors import UsageError
from psfleet.validation.annotations import PositiveInt, checked

Sample = list[tuple[str, list[Any]]]


class DataGenerator:
    """Base of the data generators. A subclass gives `generate_sample`.

        class Clicks(fleet.MultiSlotDataGenerator):
            def generate_sample(self, line):
                def samples():
                    user, label = line.split()
                    yield [("user", [int(user)]), ("label", [int(label)])]

                return samples

        Clicks().run_from_stdin()

    A dataset with `set_pipe_command("python clicks.py")` reads what it prints.
    """

    def __init__(self) -> None:
        self._batch_size = 32

    @checked
    def set_batch(self, batch_size: PositiveInt) -> None:
        """Set the number of samples that `generate_batch` gets at once."""
        self._batch_size = batch_size

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Sample | None]]:
        """A function that gives the samples of a line, each a list of (name, values); None is passed over.

        Args:
            line: None in `run_from_memory`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_sample(self, line)")

    def generate_batch(self, samples: list[Sample]) -> Callable[[], Iterable[Sample]]:
        """A function that gives the samples to print for a batch of them: the batch itself."""
        return lambda: samples

    def run_from_stdin(self) -> None:
        """Read lines from the standard input and print their samples."""
        self._print(sample for line in sys.stdin for sample in self.generate_sample(line)())

    def run_from_memory(self) -> None:
        """Print the samples of `generate_sample(None)`."""
        self._print(self.generate_sample(None)())

    def _print(self, samples: Iterable[Sample | None]) -> None:
        for batch in self._batches(samples):
            for sample in self.generate_batch(batch)():
                sys.stdout.write(self._line(sample))

    def _batches(self, samples: Iterable[Sample | None]) -> Iterator[list[Sample]]:
        batch: list[Sample] = []
        for sample in samples:
            if sample is not None:
                batch.append(sample)
            if len(batch) == self._batch_size:
                yield batch
                batch = []
        if batch:
            yield batch

    def _line(self, sample: Any) -> str:
        """One sample as a line: of each variable the number of values, then the values."""
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
    """A data generator whose values are numbers."""

    def _word(self, name: str, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UsageError(
                f"{type(self).__name__}: {name!r} has the value {value!r}; it must be a number"
            )
        return str(value)


class MultiSlotStringDataGenerator(DataGenerator):
    """A data generator whose values are words that are numbers already."""

    def _word(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value.split()) != 1:
            raise UsageError(
                f"{type(self).__name__}: {name!r} has the value {value!r}; it must be one word"
            )
        return value
