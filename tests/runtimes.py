"""A runtime that a test has for itself, and one that writes down its calls."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.graph.program import names
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current


@contextmanager
def own_runtime() -> Iterator[EmbeddedRuntime]:
    """Make a fresh embedded runtime the active one inside the block; then it is closed."""
    fresh = EmbeddedRuntime()
    before = current().use(fresh)
    try:
        yield fresh
    finally:
        current().use(before)
        fresh.close()


@contextmanager
def own_programs(seed: int = 0) -> Iterator[Program]:
    """Build in fresh programs inside the block, with names that count from 0."""
    with names.guard(), program_guard(program := Program(random_seed=seed), Program()):
        yield program


class CountingRuntime(EmbeddedRuntime):
    """An embedded runtime that writes down its calls.

    Attributes:
        calls: "pull" or "push", and of how many tables.
        pushed: The gradients of each push.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.pushed: list[list[Gradient]] = []

    def pull(self, reads: Sequence[Read]) -> list[Any]:
        self.calls.append(("pull", len(reads)))
        return super().pull(reads)

    def push(self, gradients: Sequence[Gradient], **shown: Any) -> Any:
        self.calls.append(("push", len(gradients)))
        self.pushed.append([*gradients])
        return super().push(gradients, **shown)
