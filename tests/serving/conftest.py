"""A trained model for the tests of a file."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving import models


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a trained model, and its predictions."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, models.train(folder)
