"""A runtime that a test has for itself."""

from collections.abc import Iterator
from contextlib import contextmanager

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.program import names
from psfleet.program.program import Program, program_guard
from psfleet.runtime.process_runtime import current


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
