"""One trainer script under each strategy, through the launcher: same bits, fewer bytes, it learns."""

import dataclasses
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.runtime.strategy import Settings
from tests.programs import ended

SCRIPT = Path(__file__).parent / "scripts" / "strategies.py"
STRATEGIES = {
    "plain": "",
    "bfloat16": "[amp]\ncompute = 'float32'\n",
    "float16": "[amp]\ndtype = 'float16'\n[gradient_merge]\nk_steps = 2\n",
    "dgc": "[dgc]\nsparsity = [0.999]\n",
    "merged dgc": "[dgc]\nsparsity = [0.99]\nrampup_begin_step = 2\n[gradient_merge]\nk_steps = 2\n",
    "merged localsgd": "[localsgd]\nk_steps = 3\nbegin_step = 2\n[gradient_merge]\nk_steps = 2\n"
    "[amp]\ncompute = 'float32'\n[recompute]\n",
}
DENSE = 104 * 600 + 600 + 600 + 1  # values of all dense tables
ON_SERVERS = [
    "merged dgc",
    pytest.param("float16", marks=pytest.mark.long),
    pytest.param("merged localsgd", marks=pytest.mark.long),
]
"""Those that servers can notice; the others are parts of these."""
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Train:
    """Runs the script under a strategy on so many servers and workers (0: embedded)."""
    known: dict[tuple[str, int, int], dict[str, Any]] = {}

    def run(name: str, servers: int, workers: int) -> dict[str, Any]:
        if (name, servers, workers) not in known:
            folder = tmp_path_factory.mktemp("run")
            (folder / "strategy.toml").write_text(STRATEGIES[name])
            command = [
                *(sys.executable, "-m", "psfleet_launch", "--sync", "--no-progress"),
                *("--servers", str(servers), "--workers", str(workers)),
                *("--strategy", str(folder / "strategy.toml"), "--log-dir", str(folder)),
                *(str(SCRIPT), str(folder / "out.npz")),
            ]
            process = ended(command)
            assert process.returncode == 0, process.stdout + process.stderr
            with np.load(folder / "out.npz") as arrays:
                known[name, servers, workers] = dict(arrays)
        return known[name, servers, workers]

    return run


@pytest.mark.parametrize("name", ON_SERVERS)
def test_number_of_servers_does_not_change_bits(train: Train, name: str) -> None:
    """Two workers with unequal numbers of steps: 1 and 2 servers end with the same bits, and training
    has taken place."""
    one, two = train(name, 1, 2), train(name, 2, 2)
    assert one.keys() == two.keys()
    for key, value in one.items():
        assert key == "bytes" or value.tobytes() == two[key].tobytes(), key
    assert one["losses"][-4:].mean() < one["losses"][:4].mean()


def test_bytes(train: Train) -> None:
    """What the servers receive: with bfloat16 half, with DGC at 99.9 % a hundredth of the dense
    gradients' bytes, beside what every run sends for its rows."""
    plain, half, few = (int(train(name, 1, 1)["bytes"]) for name in ("plain", "bfloat16", "dgc"))
    dense = 4 * DENSE * 13
    rows = plain - dense  # ids and gradients of rows, headers, pulls
    assert 0 < rows < dense / 10
    assert half < dense / 2 + rows
    assert few - rows < dense / 100


def test_the_page_names_every_setting() -> None:
    """docs/strategies.md has every part and every setting."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "strategies.md").read_text()
    hints = typing.get_type_hints(Settings)
    for part in dataclasses.fields(Settings):
        kinds = [
            kind
            for kind in (hints[part.name], *typing.get_args(hints[part.name]))
            if dataclasses.is_dataclass(kind)
        ]
        for name in (part.name, *(one.name for kind in kinds for one in settings_of(kind))):
            assert f"`{name}`" in page, f"{part.name} {name}"
