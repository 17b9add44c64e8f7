"""A URL is refused where only a folder will do: it would become a local folder named by its scheme."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from psfleet import checkpoint
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.observability.logged_values import EventFile
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import ProcessSettings
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fluid.layer_modules import load_dygraph, save_dygraph
from psfleet_launch.commands.launch_command import main as launch
from psfleet_launch.commands.psfleet_cli import main as command

URL = "s3://bucket/m"
SENTENCE = "'s3:/{1,2}bucket/m(.pd[a-z]*)?' is a URL, and only local and mounted file systems"
TABLE = TableSpec("t", "sparse", (2,), SGD())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present folder, with a snapshot `made` in it."""
    monkeypatch.chdir(tmp_path)
    runtime = EmbeddedRuntime()
    runtime.create(TABLE)
    runtime.save("made")
    return tmp_path


@pytest.mark.parametrize("url", ["s3://b/x", "hdfs://n/x", "gs://b", "abfs+x://b/x"])
def test_urls_and_paths(url: str) -> None:
    """Every scheme is one, also where a Path has made one slash of two; names with a colon are paths."""
    for given in (url, Path(url)):
        with pytest.raises(ConfigError, match=r"is a URL, .* name a folder"):
            local_path(given)
    for path in ("a:b", "12:30/x", "./s3:/b", "/s3:/b", "C", "x/http://y"):
        assert local_path(path) == Path(path)


@pytest.mark.parametrize(
    "call",
    [
        lambda: checkpoint.read_rows(URL),
        lambda: save_dygraph({"w": np.zeros(2, np.float32)}, URL),
        lambda: load_dygraph(URL),
        lambda: EventFile(URL),
        lambda: make_credentials(URL),
        lambda: from_variable(ProcessSettings, "snapshots", {"PSFLEET_SNAPSHOTS": URL}),
    ],
)
def test_functions(call: Callable[[], object], folder: Path) -> None:
    """Each function that writes or reads a folder says so, and nothing is written."""
    with pytest.raises(ConfigError, match=SENTENCE):
        call()
    assert [path.name for path in folder.iterdir()] == ["made"]


@pytest.mark.parametrize(
    "line", ["psfleet certs", "--log-dir", "--tensorboard", "--render kubernetes"]
)
def test_commands(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """So does a command, and each setting of a job before anything starts, in one sentence."""
    if line.startswith("psfleet"):
        assert command([*line.split()[1:], URL]) != 0
    else:
        assert launch([*line.split(), URL, "train.py"]) == 2
    error = capsys.readouterr().err
    assert "is a URL" in error
    assert error.count("\n") == 1
    assert [path.name for path in folder.iterdir()] == ["made"]
