"""Everything that reads files."""

from pathlib import Path

from tests.fuzz import chains, files, tools
from tests.fuzz.files import Reader


def every_reader(folder: Path) -> list[Reader]:
    """Every one, with good files that are made in the folder."""
    readers = []
    for module in (files, chains, tools):
        place = folder / module.__name__
        place.mkdir(parents=True)
        readers += module.readers(place)
    return readers
