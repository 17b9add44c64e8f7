"""Every reader of files with changed files, through the functions that users and servers call.

The promise: a file is read, or refused with one of psfleet's own errors, soon and for little memory.
What carries checksums is never read with a byte changed. A shard that was to be loaded from a damaged
file is as it was.
"""

import contextlib
import hashlib
import json
import random
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import psfleet as ps
from psfleet import layers
from psfleet.checkpoint import MANIFEST, load_shard, read_manifest, save_fleet
from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.graph.execution.inference import load_inference, save_inference
from psfleet.core.graph.program.variable import Variable
from psfleet.core.net import message_codec
from psfleet.core.net.connections.credentials import FILES, Credentials
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import Settings, load_strategy_file, resolve
from psfleet.features import Feature, FeatureSet, Table
from psfleet.fleet.file_datasets import FileDataset
from psfleet.fluid.layer_modules import load, save
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog
from tests.fuzz.frames import SLOW, Broken
from tests.fuzz.mutations import mutated_bytes
from tests.server.seating import register

SPECS = (
    TableSpec("whole", "dense", (3, 2), make_rule("adam", {})),
    TableSpec("rows", "sparse", (2,), make_rule("adagrad", {}), seed=5),
)
HEADER = LogHeader(job="j")
_STRANGE: list[Any] = [None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**70, 1e308, "", "x", "é" * 40]
_STRANGE += [[], {}, [[]], {"x": 1}, "dense", "sparse", "../x", "\0", [2**40], "int64", "object"]


@dataclass(frozen=True)
class Reader:
    """A kind of file.

    Attributes:
        files: Good ones: name (in folders, if that has slashes) and content.
        read: Reads them from a folder.
        checked: Whether a change of any byte must be noticed.
        reseal: Makes checksums fit again after a change, so that what lies behind them is reached.
        strangers: Whole files of others, one of which may come in a file's place. If there are any, a
            file may also be missing, or be another one of its own kind.
    """

    name: str
    files: Mapping[str, bytes]
    read: Callable[[Path], Any]
    checked: bool = False
    reseal: Callable[[Path], None] | None = None
    strangers: Sequence[bytes] = ()

    def lay(self, folder: Path, changed: Mapping[str, bytes | None] | None = None) -> None:
        """Write the files into an empty folder, some of them changed or (None) missing."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, content in {**self.files, **(changed or {})}.items():
            where = folder / name
            where.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                where.write_bytes(content)
                where.chmod(0o600)
        if self.reseal is not None:
            self.reseal(folder)


@dataclass
class Tally:
    """What has been tried: of each reader files, refusals and the slowest."""

    files: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    slowest: float = 0.0

    def __str__(self) -> str:
        parts = [f"{name} {self.refused[name]:,}/{count:,}" for name, count in self.files.items()]
        return (
            f"{sum(self.files.values()):,} files (refused of tried: {', '.join(parts)}), "
            f"slowest {self.slowest * 1000:.0f} ms of processor time"
        )


# -- good files ----------------------------------------------------------------------------------


def a_shard() -> Shard:
    """A shard with both tables, trained a little."""
    shard = Shard(workers=1)
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.create(SPECS[0], np.arange(6, dtype=np.float32), 0)
    shard.create(SPECS[1], np.empty(0, np.float32), 0)
    ids = np.array([3, -9, 2**63 - 1])
    for number in (1, 2):
        gradients = (
            Gradient(SPECS[0].key, np.ones(6, np.float32), None, 0.1),
            Gradient(SPECS[1].key, np.ones((3, 2), np.float32), ids, 0.1),
        )
        shard.handle(Push(0, 1, number, gradients, 1, 0.5), "push")
    return shard


def content(shard: Shard) -> list[Any]:
    """Every value of a shard's tables that a user can pull."""
    from psfleet.core.engine.runtime_interface import Read

    ids = np.array([3, -9, 2**63 - 1, 7])
    reads = [Read(s.key, ids if s.kind == "sparse" else None) for s in SPECS]
    return [values.tobytes() for values in shard.tables.read(reads)]


def of_folder(folder: Path) -> dict[str, bytes]:
    """All its files."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _checkpoint(folder: Path) -> dict[str, bytes]:
    save_fleet(str(folder / "made"), [a_shard()])
    return of_folder(folder / "made")


def _load_checkpoint(folder: Path) -> None:
    shard = a_shard()
    before = content(shard)
    try:
        load_shard(str(folder), shard)
    except PsfleetError:
        if content(shard) != before:
            raise Broken("a checkpoint was refused and has changed the shard") from None
        raise


def seal_manifest(folder: Path) -> None:
    """Give a manifest the lengths and checksums of the files there, and of the manifest before it."""
    where = folder / MANIFEST
    said = json.loads(where.read_bytes())
    for entry in said["files"]:
        data = (folder / str(entry["file"])).read_bytes()
        entry["bytes"], entry["sha256"] = len(data), hashlib.sha256(data).hexdigest()
    if said.get("base"):
        before = (folder / said["base"]["path"] / MANIFEST).read_bytes()
        said["base"]["sha256"] = hashlib.sha256(before).hexdigest()
    said.pop("sha256", None)
    body = json.dumps(said, indent=1, sort_keys=True)
    said["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    where.write_text(json.dumps(said, indent=1, sort_keys=True))


def _reseal_checkpoint(folder: Path) -> None:
    with contextlib.suppress(Exception):  # where nothing fits, nothing need be made to fit
        seal_manifest(folder)


def _kept(path: Path) -> tuple[ServerLog, Shard, Coordinator]:
    log, shard, coordinator = ServerLog(path, HEADER), Shard(workers=1), Coordinator(1)
    try:
        Journal(log, shard, coordinator).start()
    except BaseException:
        log.close()
        raise
    return log, shard, coordinator


def _log(folder: Path) -> dict[str, bytes]:
    log, shard, coordinator = _kept(folder / "server.0.log")
    register(coordinator, 0, 70, 1)
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.create(SPECS[0], np.arange(6, dtype=np.float32), 0)
    shard.create(SPECS[1], np.empty(0, np.float32), 0)
    for number in (1, 2, 3):
        rows = np.ones((2, 2), np.float32)
        gradient = Gradient(SPECS[1].key, rows, np.array([number, -1]), 0.1)
        shard.handle(Push(0, 1, number, (gradient,), 1, 0.5), "push")
    coordinator.leave(0, 1)
    log.close()
    return of_folder(folder)


def _replay(folder: Path) -> None:
    log, _, _ = _kept(folder / "server.0.log")
    log.close()


def reseal_log(folder: Path) -> None:
    """Compute the checksums of every record of a log again, as far as lengths make sense."""
    end = chain = 0
    for path in sorted(folder.glob("server.0*.log"), key=lambda path: (len(path.name), path)):
        data = bytearray(path.read_bytes())
        with contextlib.suppress(Exception):  # where nothing fits, nothing need be made to fit
            _go_on(data, end, chain)
        with contextlib.suppress(struct.error):
            end, chain = _reseal_records(data)
        path.write_bytes(data)


def _go_on(data: bytearray, end: int, chain: int) -> None:
    """Let the header say where the file before ends."""
    length = struct.unpack_from("<I", data, 12)[0]
    said: LogHeader = message_codec.decode(LogHeader, bytes(data[20 : 20 + length]))
    if said.after is not None:
        after = replace(said.after, end=end, chain=chain)
        text = message_codec.encode(replace(said, after=after))
        data[12 : 20 + length] = struct.pack("<II", len(text), 0) + text


def _reseal_records(data: bytearray) -> tuple[int, int]:
    """Where the last whole record ends, and its checksum."""
    length = struct.unpack_from("<I", data, 12)[0]
    at = 20 + length
    chain = zlib.crc32(bytes(data[8:12] + data[20:at]))
    struct.pack_into("<I", data, 16, chain)
    while at + 20 <= len(data):
        size, _, kind = struct.unpack_from("<QIB3x", data, at)
        if size > len(data) - at - 20:
            break
        crc = zlib.crc32(bytes(data[at + 20 : at + 20 + size]))
        fields = struct.pack("<QIB3x", size, crc, kind)
        chain = zlib.crc32(fields, chain)
        data[at : at + 20] = fields + struct.pack("<I", chain)
        at += 20 + size
    return at, chain


def _model(folder: Path) -> dict[str, bytes]:
    before = current().use(EmbeddedRuntime())
    try:
        with ps.program_guard(ps.Program(), ps.Program()):
            ids = layers.data("ids", [None, 2], dtype="int64")
            rows = layers.embedding(ids, size=[7, 3])
            out = layers.fc(layers.reshape(rows, [-1, 6]), 2, act="relu")
            save_inference(str(folder / "made"), [ids], [out], ps.default_main_program())
    finally:
        current().use(before)
    return of_folder(folder / "made")


def _state(folder: Path) -> dict[str, bytes]:
    save({"w": np.ones((2, 3), np.float32), "step": 3, "lr": {"rate": 0.1}}, str(folder / "state"))
    return of_folder(folder)


_STRATEGY = b"""
[consistency]
mode = "sync"
[gradient_merge]
k_steps = 4
[pipeline]
schedule = "1f1b"
stages = 2
micro_batches = 8
[recompute]
"""


def _strategy(folder: Path) -> Settings:
    return resolve(None, json.dumps(load_strategy_file(str(folder / "strategy.toml"))))


def _slots(folder: Path) -> list[Any]:
    dataset = FileDataset()
    dataset.set_use_var([Variable("a", (None, 2), "int64"), Variable("b", (None, 1), "float32")])
    dataset.set_batch_size(2)
    dataset.set_filelist([str(folder / "slots")])
    return list(dataset)


def _environment(folder: Path) -> Any:
    """Settings that come as text: limits and the launcher's strategy."""
    text = (folder / "text").read_text(errors="replace")
    limits = ServerLimits.read(text.partition("\n")[0])
    return limits, resolve(None, text.partition("\n")[2])


def _text_readers() -> list[Reader]:
    """Readers of samples in lines of text; none if pyarrow is not installed."""
    if find_spec("pyarrow") is None:
        return []
    from psfleet.data.text_files import TextFiles

    table = Table("t", 2)
    pairs = FeatureSet([Feature("index", table, weighted=True, weights_column="value")])
    ratings = FeatureSet([Feature("userId", table), Feature("movieId", table)])
    return [
        Reader(
            "libsvm",
            {"f": b"1 0:1 3:0.5 7:1e3 # a\n-1 2:4\n\n0 1:1\n"},
            lambda at: TextFiles(at / "f", pairs, ["label"], format="libsvm").group(0),
        ),
        Reader(
            "ratings",
            {"f": b'userId,movieId,rating,t\n1,2,3.5,0\n4,5,"1",0\n'},
            lambda at: TextFiles(at / "f", ratings, ["rating"], format="csv").group(0),
        ),
    ]


def readers(folder: Path) -> list[Reader]:
    """Every kind of file; good ones are made in the folder."""

    def place(name: str) -> Path:
        made = folder / name
        made.mkdir()
        return made

    checkpoint, log = _checkpoint(place("checkpoint")), _log(place("log"))
    pem = dict.fromkeys(FILES, b"-----BEGIN X-----\nabc\n") | {"token": b"t" * 43}
    return [
        Reader("checkpoint", checkpoint, _load_checkpoint, checked=True),
        Reader("hostile checkpoint", checkpoint, _load_checkpoint, reseal=_reseal_checkpoint),
        Reader("manifest", {MANIFEST: checkpoint[MANIFEST]}, read_manifest, checked=True),
        Reader("log", log, _replay),
        Reader("hostile log", log, _replay, reseal=reseal_log),
        Reader("model", _model(place("model")), lambda at: load_inference(str(at))),
        Reader("state dict", _state(place("state")), lambda at: load(str(at / "state"))),
        Reader("strategy", {"strategy.toml": _STRATEGY}, _strategy),
        Reader(
            "text settings",
            {"text": b'tables=5,message=100\n{"consistency": {"mode": "sync"}}'},
            _environment,
        ),
        *_text_readers(),
        Reader("slots", {"slots": b"2 5 6 1 0.5\n2 7 8 1 1.5\n2 1 1 1 2\n"}, _slots),
        Reader("credentials", pem, Credentials.read),
    ]


# -- changed files -------------------------------------------------------------------------------


def _nodes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        yield from _nodes(inner, (*path, key))


def changed_json(dice: random.Random, text: bytes) -> bytes:
    """The document with some of its values, or whole parts, replaced."""
    document = json.loads(text)
    for _ in range(dice.choice((1, 1, 2))):
        *way, last = dice.choice(list(_nodes(document)))
        inner = document
        for key in way:
            inner = inner[key]
        match dice.randrange(4):
            case 0:
                del inner[last]
            case 1 if isinstance(inner, list):
                inner.append(inner[last])
            case _:
                inner[last] = dice.choice(_STRANGE)
        if not document:
            break
    return json.dumps(document, indent=1, sort_keys=True).encode()


def _changed(dice: random.Random, reader: Reader, good: bytes) -> bytes | None:
    """What is in the place of a good file; None: nothing."""
    others = list(reader.files.values())
    if reader.strangers and dice.randrange(4) == 0:
        return dice.choice([None, *others, *reader.strangers])
    if good.startswith(b"{") and dice.randrange(2):
        return changed_json(dice, good)
    return mutated_bytes(dice, good, others)


def attack(dice: random.Random, reader: Reader, folder: Path, tally: Tally) -> None:
    """Read one changed set of files.

    Raises:
        Broken: See the top of this module.
    """
    name = dice.choice(list(reader.files))
    put = _changed(dice, reader, reader.files[name])
    reader.lay(folder, {name: put})
    changed = (folder / name).read_bytes() if put is not None else b""
    began = time.thread_time()
    refused = False
    try:
        reader.read(folder)
    except PsfleetError as error:
        refused = True
        if "\n" in str(error) and reader.name != "strategy":
            raise Broken(f"{reader.name}: {name} {changed!r}: {error!r} is no sentence") from error
    except Broken as error:
        raise Broken(f"{reader.name}: {name} {changed!r}: {error}") from None
    except BaseException as error:
        raise Broken(f"{reader.name}: {name} {changed!r} raised {error!r}") from error
    taken = time.thread_time() - began
    tally.slowest = max(tally.slowest, taken)
    tally.files[reader.name] = tally.files.get(reader.name, 0) + 1
    tally.refused[reader.name] = tally.refused.get(reader.name, 0) + refused
    if taken > SLOW:
        raise Broken(f"{reader.name}: {name} {changed[:500]!r} took {taken:.1f} s")
    if reader.checked and not refused and changed != reader.files[name]:
        raise Broken(f"{reader.name}: {name} {changed!r} was read though it is damaged")


def fuzz(found: Sequence[Reader], count: int, seed: int, folder: Path) -> Tally:
    """Let readers read `count` changed sets of files; they are made in `folder`, best in memory."""
    tally = Tally()
    dice = random.Random(seed)
    for number in range(count):
        reader = found[number % len(found)]
        attack(dice, reader, folder / reader.name.replace(" ", "-"), tally)
    return tally
