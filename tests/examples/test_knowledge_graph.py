"""The knowledge graph example on a small made-up graph in the format of OpenKE."""

import re
import sys
from pathlib import Path

import knowledge_graph_data
import numpy as np
import pytest

from psfleet.checkpoint import compare
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.schema.table import OWN
from tests.programs import IN_DOCS, ended

pytestmark = pytest.mark.long

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "knowledge_graph.py"
ENTITIES, RELATIONS = 40, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring of entities; relation r leads r + 1 places on. All 120 triples in three parts."""
    folder = tmp_path_factory.mktemp("graph")
    head, relation = np.divmod(np.arange(ENTITIES * RELATIONS), RELATIONS)
    triples = np.stack([head, (head + relation + 1) % ENTITIES, relation], axis=1)
    triples = np.random.default_rng(0).permutation(triples)
    for name, part in zip(
        knowledge_graph_data.CHECKSUMS, np.split(triples, [90, 105]), strict=True
    ):
        lines = [str(len(part)), *(" ".join(map(str, row)) for row in part.tolist())]
        (folder / name).write_text("\n".join(lines))
    return folder


def test_every_triple_gives_two_queries(folder: Path) -> None:
    """The tail answers (head, relation), and the head answers (tail, inverse relation)."""
    graph = knowledge_graph_data.load(folder, is_checked=False)
    assert graph.entities == ENTITIES
    assert [len(triples) for triples in graph.triples.values()] == [180, 30, 30]
    for entity in range(ENTITIES):
        for relation in range(RELATIONS):
            tail = (entity + relation + 1) % ENTITIES
            assert graph.known.of(np.array([entity, relation])).tolist() == [tail]
            assert graph.known.of(np.array([tail, relation + RELATIONS])).tolist() == [entity]


def test_candidates_stand_for_all_entities(folder: Path) -> None:
    """Answers count once; the others that were drawn count as many times as there are others."""
    graph = knowledge_graph_data.load(folder, is_checked=False)
    replies, seed = np.array([3, 39, 3, 20]), np.arange(2)
    for drawn in (0, 5, ENTITIES):
        candidates, shift = graph.candidates(replies, drawn, seed)
        assert np.isin(replies, candidates).all()
        assert (np.diff(candidates) > 0).all()
        assert len(candidates) in (range(6, 9) if drawn == 5 else (ENTITIES,))
        assert (shift[np.isin(candidates, replies)] == 0).all()
        np.testing.assert_allclose(np.exp(shift).sum(), ENTITIES, rtol=1e-6)


def test_a_missing_file_is_named_with_its_source(tmp_path: Path) -> None:
    """One sentence says where to get it."""
    with pytest.raises(UsageError, match=r"train2id.txt is missing; download it from https://"):
        knowledge_graph_data.load(tmp_path)


def test_another_file_is_refused(folder: Path) -> None:
    """A file with another checksum is no base for figures that are compared with published ones."""
    with pytest.raises(UsageError, match=r"train2id.txt has the SHA-256 [0-9a-f]+, not 5f44223a"):
        knowledge_graph_data.load(folder)


@pytest.mark.parametrize("model", ["complex", pytest.param("transe", marks=IN_DOCS)])
def test_rows_are_the_same_bits_on_any_number_of_servers(
    model: str, folder: Path, tmp_path: Path
) -> None:
    """Two workers in sync mode with 1 and 2 servers, ComplEx with 1 and 4; ranks are the same too.

    TransE looks for answers among 8 random entities, ComplEx among all.
    """
    said = {}
    candidates = "0" if model == "complex" else "8"
    for servers in ("1", "4") if model == "complex" else ("1", "2"):
        options = ("--model", model, "--candidates", candidates)
        said[servers] = run(folder, tmp_path / servers, servers, *options)
    for servers in said:
        actual = compare(str(tmp_path / "1" / "model"), str(tmp_path / servers / "model"))
        tables = [difference for difference in actual if not difference.table.startswith(OWN)]
        assert len(tables) == 2
        assert all(difference.is_equal for difference in tables), actual
    assert len(set(said.values())) == 1, said


def run(folder: Path, place: Path, servers: str, *arguments: str) -> str:
    """Run the example; what it says of the valid and test triples. It saves its model as `model`."""
    place.mkdir()
    launch = ["-m", "psfleet_launch", "--no-progress", "--log-dir", str(place / "logs"), "--sync"]
    options = ["--data", str(folder), "--any-data", "--epochs", "3", "--dim", "8", "--batch", "60"]
    process = ended(
        [
            *(sys.executable, *launch, "--servers", servers, "--workers", "2", str(EXAMPLE)),
            *(*options, "--out", str(place / "model"), *arguments),
        ],
        cwd=place,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    matches = re.findall(r"(\w+ MRR [\d.]+   Hits@10 [\d.]+)", process.stdout)
    assert len(matches) == 2, process.stdout
    return "; ".join(matches)
