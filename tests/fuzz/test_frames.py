"""Changed requests to every method: see tests.fuzz.frames for the promise. FUZZ_FRAMES asks for more."""

import contextlib
import importlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psfleet.core.net import v1
from psfleet.core.net.v1 import shard_pb2
from tests.fuzz.frame_attacks import Tally, attack, fuzz
from tests.fuzz.frames import Ground
from tests.fuzz.mutations import Fed

pytestmark = pytest.mark.long

FRAMES = int(os.environ.get("FUZZ_FRAMES", "1500"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Requests to save and load name folders in the present one."""
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").mkdir()
    return Path.cwd()


def promised() -> set[str]:
    """Every method that servers of parameters answer: in the files of the protocol, and of servers alone."""
    methods = {f"/psfleet.v1.Membership/{name}" for name in ("Freeze", "Install")}
    moves = ("Open", "Send", "Fill", "Prepare", "Adopt", "Abandon")
    methods |= {f"/psfleet.v1.Scaling/{name}" for name in moves}
    for path in Path(v1.__file__).parent.glob("*_pb2.py"):
        definition = importlib.import_module(f"psfleet.core.net.v1.{path.stem}").DESCRIPTOR
        for service in definition.services_by_name.values():
            # It is of a server of predictions (tests/serving).
            if service.name != "Prediction":
                methods |= {f"/{service.full_name}/{method.name}" for method in service.methods}
    return methods


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rates of 1e308 are the sender's own
def test_every_method_is_attacked() -> None:
    """Each that the protocol has is answered here, and has a request from which the changed ones are
    made, a new one too."""
    with contextlib.closing(Ground(shard_pb2.MODE_SYNC)) as ground:
        assert set(ground.methods) == promised()
        assert ground.unknown() == set()


@pytest.mark.timeout(24 * 3600 if FRAMES > 10_000 else 180)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_request_brings_a_server_down(working_folder: Path) -> None:
    """Thousands of changed requests: answers or sentences, and a refused one has changed nothing."""
    tally = fuzz(FRAMES, SEED, working_folder)
    print(tally)
    assert tally.frames == FRAMES
    assert tally.refused > FRAMES / 4
    assert tally.methods == promised()


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([1, 2]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_hypothesis_finds_nothing_either(entropy: bytes, mode: int) -> None:
    """The same with hypothesis choosing, so that a failure comes back small and is remembered."""
    with contextlib.closing(Ground(mode)) as ground:
        dice, tally, before = Fed(entropy), Tally(), None
        for _ in range(20):
            before = attack(ground, dice, tally, before or ground.state())
