"""Golden files of format version 1 are read bit for bit; what a reader does not know, it refuses."""

import ast
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from psfleet import fluid
from psfleet.checkpoint import (
    MANIFEST,
    CutPosition,
    Manifest,
    Part,
    ShardFile,
    compare,
    load_shard,
    read_manifest,
)
from psfleet.checkpoint.manifest import write_manifest
from psfleet.core.base.errors import CheckpointError, FrameError, PsfleetError, UsageError
from psfleet.core.base.job_files import read_ready, read_reply, read_request
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.worker_state import read_states
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.execution.inference import load_inference
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.fluid.layer_modules import load
from psfleet_launch.chaos.audit import HELD, AuditedPushes, AuditedRow, read_pushed
from tests.checkpoint.goldens import (
    GROUPS_3,
    VERSION,
    VERSION_2,
    VERSION_3,
    build,
    build_groups,
    names,
)
from tests.fuzz.files import of_folder

ROOT = Path(__file__).parents[2]
SHARD = "shard-0-of-2.safetensors"
BY_PSFLEET = (".json", ".told", ".csv", "ready.0")  # and files of shards


@pytest.fixture
def fleet() -> Iterator[None]:
    """A runtime of this test alone."""
    fresh = EmbeddedRuntime()
    before = current().use(fresh)
    yield
    current().use(before)
    fresh.close()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this psfleet writes of the same content."""
    folder = tmp_path_factory.mktemp("goldens") / "new"
    build(folder)
    return folder


def test_the_same_content_gives_the_same_bytes(built: Path) -> None:
    """Every file that psfleet itself encodes equals its golden file, bit for bit.

    `names.json` is not one: new operations and rules may join it (test_names_in_files_stay).
    """
    new, old = of_folder(built), of_folder(VERSION) | of_folder(VERSION_3)
    ours = {name for name in old if name.endswith(BY_PSFLEET) or "/shard-" in name} - {"names.json"}
    assert len(ours) == 12
    for name in ours:
        assert new[name] == old[name], name


def test_files_of_libraries_hold_the_same(built: Path) -> None:
    """Arrays in safetensors and npz files are equal in every bit, and so is what the files say."""
    found = [
        path for path in VERSION.rglob("*") if path.suffix in (".safetensors", ".pdopt", ".npz")
    ]
    assert len(found) == 12
    for path in found:
        load: Callable[[Path], Any] = np.load if path.suffix == ".npz" else load_file
        name = path.relative_to(VERSION)
        newest = VERSION_3 / name if (VERSION_3 / name).exists() else path
        old, new = load(newest), load(built / name)
        assert sorted(old) == sorted(new)
        for name in old:
            np.testing.assert_array_equal(old[name], new[name], strict=True)


@pytest.mark.parametrize("name", ["base", "delta"])
def test_snapshots_load_as_they_were(built: Path, name: str) -> None:
    """Weights, state, clocks and what workers keep: nothing differs from a snapshot of this psfleet."""
    assert all(
        difference.is_equal for difference in compare(str(VERSION / name), str(built / name))
    )
    assert read_manifest(VERSION_3 / name) == read_manifest(built / name)
    manifest = read_manifest(VERSION / name)
    assert replace(manifest, files=(), base=None) == replace(
        read_manifest(built / name), files=(), base=None
    )
    assert manifest.kind == ("delta" if name == "delta" else "full")
    state = read_states(manifest.workers[1])
    assert state["rate"] == {"last_epoch": 3, "last_lr": 0.05}
    np.random.default_rng().bit_generator.state = state["noise"]
    for servers in (1, 3):
        for index in range(servers):
            load_shard(VERSION / name, Shard(index, servers))


def test_version_2_says_where_tables_are(tmp_path: Path) -> None:
    """Tables on groups of servers: the same bytes, and the content that version 1 has of all servers."""
    build_groups(tmp_path / "new")
    assert of_folder(tmp_path / "new") == of_folder(VERSION_2) | of_folder(GROUPS_3)
    base = VERSION_2 / "base"
    assert all(one.is_equal for one in compare(str(base), str(VERSION / "base")))
    groups = [(spec.servers, spec.first) for spec in read_manifest(base).tables]
    assert groups == [(1, 0), (1, 3), (None, 0)]
    document = json.loads((base / MANIFEST).read_text())
    assert document["version"] == 2
    folder = shutil.copytree(base, tmp_path / "m")
    seal(folder, document | {"version": 1})
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(folder)


@pytest.mark.usefixtures("fleet")
def test_models_and_states_load() -> None:
    """A program computes, an optimizer's state comes back, and small files of a job say what they said."""
    program, feeds, targets = load_inference(str(VERSION / "model"))
    [out] = Executor().run(program, {feeds[0]: np.array([[1, 6]])}, targets)
    assert out.shape == (1, 2)
    _, state = fluid.load_dygraph(str(VERSION / "state"))
    assert state["LR_Scheduler"] == {"last_epoch": 0, "last_lr": 0.5}
    np.testing.assert_array_equal(state["w.moment1"], np.full(3, 0.1, np.float32), strict=True)
    job = VERSION / "job"
    assert read_ready(job / "ready.0") == ("unix:/tmp/psfleet/server.0", 4711)
    assert read_request(job) == (3, {"mode": "ssp", "staleness": 4})
    assert read_reply(job) == 3
    pushes = {AuditedRow(0, 1, 7, 7 << 32): AuditedPushes(2, 2, 2)}
    assert read_pushed(VERSION_2 / "job") == pushes


@pytest.mark.usefixtures("fleet")
def test_a_torch_state_dict_loads() -> None:
    """As a file of torch.save, without unpickling; another version or an unknown part is refused."""
    torch = pytest.importorskip(
        "torch", reason="PyTorch is not installed: pip install psfleet[torch]"
    )
    import psfleet.torch as pst

    model = torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True), torch.nn.Linear(2, 1))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    _, opt = pst.convert(model, [sparse, torch.optim.Adam(model[1].parameters())])
    good = torch.load(VERSION / "optimizer.pt", weights_only=True)
    opt.load_state_dict(good)
    torch.testing.assert_close(opt.state_dict(), good, rtol=0, atol=0)
    for change, words in (({"psfleet": 2}, "version 2"), ({"extra": 1}, "unknown field 'extra'")):
        with pytest.raises(UsageError) as error:
            opt.load_state_dict(good | change)
        check_sentence(error.value, words)
    torch.testing.assert_close(opt.state_dict(), good, rtol=0, atol=0)


def test_names_in_files_stay() -> None:
    """Names of operations, rules, hyperparameters and slots are part of the format: none has gone."""
    known = json.loads((VERSION / "names.json").read_text())
    present = names()
    assert set(known["operations"]) <= set(present["operations"])
    for part in ("rules", "slots"):
        for name, those in known[part].items():
            assert set(those) <= set(present[part][name])


# -- what is refused -----------------------------------------------------------------------------


Path_ = tuple[str | int, ...]


def at(said: Any, way: Path_) -> Any:
    """A part of a document."""
    for key in way:
        said = said[key]
    return said


def seal(folder: Path, said: dict[str, Any]) -> None:
    """Write a manifest whose checksums are right."""
    for number, file in enumerate(said.get("files", [])):
        data = (folder / file.get("file", f"shard-{number}-of-2.safetensors")).read_bytes()
        sums = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        file |= {name: value for name, value in sums.items() if name in file}
    said.pop("sha256", None)
    body = json.dumps(said, indent=1, sort_keys=True)
    said["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(said, indent=1, sort_keys=True))


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file; the tensors stay."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


def change_document(path: Path, way: Path_, name: str, value: Any) -> None:
    """Set a field of psfleet's own document in the header of a safetensors file."""

    def change(header: dict[str, Any]) -> None:
        document = json.loads(header["__metadata__"]["psfleet"])
        at(document, way)[name] = value
        header["__metadata__"]["psfleet"] = json.dumps(document)

    change_header(path, change)


def refused(folder: Path, file: str, *words: str) -> None:
    """Loading raises one sentence with the file's name and these words, and changes nothing."""
    shard = Shard()
    with pytest.raises(CheckpointError) as error:
        load_shard(folder, shard)
    check_sentence(error.value, str(folder / file), *words)
    assert not shard.tables


def check_sentence(error: PsfleetError, *words: str) -> None:
    """One line with these words that says what to do."""
    text = str(error)
    assert "\n" not in text
    for word in (*words, "read it with the psfleet version that wrote it"):
        assert word in text, text


@pytest.mark.parametrize(
    "way",
    [
        (),
        ("cut",),
        ("files", 1),
        ("tables", 0),
        ("tables", 0, "decay"),
        ("tables", 0, "initializer"),
        ("tables", 1, "entry"),
        ("workers", "1"),
        ("workers", "1", "place"),
    ],
    ids=str,
)
def test_a_manifest_has_exactly_its_fields(way: Path_, tmp_path: Path) -> None:
    """One field too many, too few or of another type, anywhere in it, and the snapshot is refused."""
    folder = shutil.copytree(VERSION / "base", tmp_path / "m")
    good = (folder / MANIFEST).read_text()
    document = json.loads(good)
    at(document, way)["extra"] = 5
    seal(folder, document)
    refused(folder, MANIFEST, "the unknown field 'extra'")
    for name in sorted(
        at(json.loads(good), way).keys()
        - {"format", "version"}
        - ({"sha256"} if not way else set())
    ):
        document = json.loads(good)
        del at(document, way)[name]
        seal(folder, document)
        refused(folder, MANIFEST, f"lacks the field '{name}'")
    for part, version in (((), 3), (("workers", "0"), "1")):
        document = json.loads(good)
        at(document, part)["version"] = version
        seal(folder, document)
        refused(folder, MANIFEST, f"version {version!r}", "reads version 1")


@pytest.mark.parametrize(
    ("way", "name", "value", "words"),
    [
        ((), "extra", 1, "unknown field 'extra' in its header"),
        (("clocks", "dense"), "extra", 1, "unknown field 'extra' in its clock"),
        ((), "version", 2, "version 2 of the format 'shard of a snapshot'"),
    ],
)
def test_a_shard_has_exactly_its_fields(
    way: Path_, name: str, value: Any, words: str, tmp_path: Path
) -> None:
    """The same for the header of a server's file."""
    folder = shutil.copytree(VERSION / "base", tmp_path / "m")
    change_document(folder / SHARD, way, name, value)
    seal(folder, json.loads((folder / MANIFEST).read_text()))
    refused(folder, SHARD, words)


def test_a_shard_has_exactly_its_tensors(tmp_path: Path) -> None:
    """A tensor that the layout does not have is refused: it might be state that matters."""
    folder = shutil.copytree(VERSION / "base", tmp_path / "m")

    def add(header: dict[str, Any]) -> None:
        end = max(entry["data_offsets"][1] for key, entry in header.items() if key[0] != "_")
        header["plain/momentum"] = {"dtype": "F32", "shape": [0], "data_offsets": [end, end]}

    change_header(folder / SHARD, add)
    seal(folder, json.loads((folder / MANIFEST).read_text()))
    refused(folder, SHARD, "the unknown tensor 'plain/momentum'")


@pytest.mark.parametrize(
    ("way", "name", "value", "words"),
    [
        ((), "extra", 1, "unknown field 'extra' in its program"),
        ((), "version", 2, "version 2 of the format 'inference model'"),
        (("leaves", 0), "extra", 1, "unknown field 'extra' in its leaf"),
        (("records", 0), "extra", 1, "unknown field 'extra' in its record"),
        (("records", 0, "settings"), "extra", 1, "unknown field 'extra' in its settings of"),
        (("records", 0), "op", "warp", "unknown operation 'warp'"),
    ],
)
def test_a_program_has_exactly_its_fields(
    way: Path_, name: str, value: Any, words: str, tmp_path: Path
) -> None:
    """Fields and operations of an inference model."""
    folder = shutil.copytree(VERSION / "model", tmp_path / "m")
    document = json.loads((folder / "program.json").read_text())
    at(document, way)[name] = value
    (folder / "program.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError) as error:
        load_inference(str(folder))
    check_sentence(error.value, "program.json", words)


def test_a_state_dict_has_exactly_its_fields(tmp_path: Path) -> None:
    """What fluid.save writes."""
    path = tmp_path / "state"
    for name, value in (("extra", 1), ("version", 2)):
        shutil.copy(VERSION / "state.pdopt", path)
        change_document(path, (), name, value)
        with pytest.raises(CheckpointError) as error:
            load(str(path))
        check_sentence(error.value, str(path), name)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("ready.0", lambda folder: read_ready(folder / "ready.0")),
        ("mode.json", read_request),
        ("mode.told", read_reply),
        (
            "held.0.json",
            lambda folder: HELD.read(folder / "held.0.json", mode=str, audit=dict, tables=dict),
        ),
    ],
)
def test_small_files_have_exactly_their_fields(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    """What processes of one job leave for each other; they may be of different installations."""
    version = VERSION if (VERSION / "job" / name).exists() else VERSION_2
    folder = shutil.copytree(version / "job", tmp_path / "job")
    good = json.loads((folder / name).read_text())
    for field, value in (("extra", 1), ("version", 3)):
        (folder / name).write_text(json.dumps(good | {field: value}))
        with pytest.raises(FrameError) as error:
            read(folder)
        check_sentence(error.value, str(folder / name), field)


def test_seats_are_sorted_as_they_are_read(tmp_path: Path) -> None:
    """A snapshot of more than ten workers is read again."""
    pushes = {seat: (1, seat) for seat in range(12)}
    written = Manifest((), (), CutPosition(1, "async", 0, pushes))
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    part = Part(ShardFile("f", "0", 1, {"t": (0, 1)}, {"t": 3}), (), "async", 0, pushes)
    assert Part.decode(part.encode()) == part


def test_no_attribute_gives_a_file_its_names() -> None:
    """No module that writes documents asks Python for the names of attributes, fields or classes."""
    homes = [ROOT / home for home in ("psfleet", "server", "worker", "launch")]
    files = [path for home in homes for path in home.rglob("*.py")]
    codecs = [path for path in files if "import Format" in path.read_text()]
    assert len(codecs) >= 10
    for path in codecs:
        text = path.read_text().replace("log_of(__name__)", "None")
        # A layer finds its own layers so; the functions beside it write documents.
        layers = ("Layer", "Sequential")
        tree = [node for node in ast.parse(text).body if getattr(node, "name", "") not in layers]
        for node in (node for part in tree for node in ast.walk(part)):
            name = getattr(node, "id", getattr(node, "attr", ""))
            asks = isinstance(node, ast.Name | ast.Attribute)
            assert not (asks and name in ("vars", "asdict", "__dict__", "__name__")), path
