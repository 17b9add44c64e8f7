"""Changed files to every reader: see tests.fuzz.files for the promise. FUZZ_FILES asks for more."""

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.files import Reader, Tally, attack, fuzz
from tests.fuzz.mutations import Fed
from tests.fuzz.tools import every_reader

FILES = int(os.environ.get("FUZZ_FILES", "650"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))

# Rates of 1e308 in hostile files.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Reader]:
    """Every reader with good files."""
    return every_reader(tmp_path_factory.mktemp("good"))


def test_good_files_are_read(found: list[Reader], tmp_path: Path) -> None:
    """What the changes start from is right."""
    for reader in found:
        place = tmp_path / reader.name.replace(" ", "-")
        reader.lay(place)
        reader.read(place)


@pytest.mark.timeout(24 * 3600 if FILES > 10_000 else 180)
def test_no_file_brings_a_reader_down(found: list[Reader]) -> None:
    """Thousands of changed files: read, or refused in a sentence; with checksums never read."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # logs wait for their disk
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        tally = fuzz(found, FILES, SEED, Path(folder))
    print(tally)
    assert sum(tally.files.values()) == FILES


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 100))
def test_hypothesis_finds_nothing_either(
    found: list[Reader], tmp_path_factory: pytest.TempPathFactory, entropy: bytes, number: int
) -> None:
    """The same with hypothesis choosing."""
    place = tmp_path_factory.getbasetemp() / "hypothesis"
    reader = found[number % len(found)]
    attack(Fed(entropy), reader, place / reader.name.replace(" ", "-"), Tally())
