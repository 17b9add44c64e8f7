"""Rules of a user, and one more of psfleet: one definition everywhere, and clear refusals of any other."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import CheckpointError, RuleError, ServerUnavailable
from psfleet.core.engine.rules import RULES, Rule, import_rules, make_rule, reference_of
from psfleet.core.engine.runtime_interface import Gradient, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing import check_rule
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.programs import ended

SOURCE = '''
"""SGD whose rate falls with the square root of the step."""
import math
from dataclasses import dataclass
from psfleet.core.engine.rules import Rule, Slot

SCALE = 1.0

def slowing(w, g, seen, h):
    return w - h[0] * g, seen + h[1]

def rate(learning_rate, step):
    """The rate of a step."""
    return SCALE * learning_rate / math.sqrt(step)

@dataclass(frozen=True)
class Slowing(Rule):
    """w -= lr / sqrt(t) * g."""
    power: float = 0.5
    name = "slowing"

    @property
    def slots(self):
        return (Slot("seen"),)

    def scalar(self):
        return slowing

    def scalars(self, learning_rate, step):
        return rate(learning_rate, step), 1.0
'''
ADVANCE = """
    def advance(self):
        return slowing

"""
Write = Callable[[str], type[Rule]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write the text of the module `own_rules`, which servers find too; its rule, newly imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = dict(RULES)

    def write(text: str) -> type[Rule]:
        (tmp_path / "own_rules.py").write_text(text)
        sys.modules.pop("own_rules", None)
        importlib.invalidate_caches()
        module: type[Rule] = importlib.import_module("own_rules").Slowing
        return module

    yield write
    sys.modules.pop("own_rules", None)
    RULES.clear()
    RULES.update(before)


def train(runtime: Runtime, rule: Rule) -> list[int]:
    """Some steps on a dense and a sparse table; their keys."""
    start = np.linspace(-1, 1, 9, dtype=np.float32)
    keys = [
        runtime.create(TableSpec("d", "dense", (9,), rule), start),
        runtime.create(TableSpec("s", "sparse", (5,), rule, seed=4)),
    ]
    for step in range(5):
        rows = np.full((4, 5), step - 1.5, np.float32)
        ids = np.array([7, -1, 7, step])
        runtime.push(
            [
                Gradient(keys[0], start * np.float32(step), learning_rate=0.1),
                Gradient(keys[1], rows, ids, learning_rate=0.1),
            ]
        )
    runtime.flush()
    return keys


def states(runtime: Runtime, keys: list[int]) -> bytes:
    """All that the tables hold."""
    found = [runtime.read_table(key) for key in keys]
    return b"".join(array.tobytes() for state in found for array in state.values)


def test_servers_give_the_bits_of_one_process(write: Write, tmp_path: Path) -> None:
    """In sync mode, and after a snapshot too; with another definition the snapshot is refused."""
    rule = write(SOURCE)()
    check_rule(rule)
    embedded = EmbeddedRuntime()
    expected = states(embedded, train(embedded, rule))
    folder = str(tmp_path / "saved")
    with LocalFleet(2, 1, rules=["own_rules"]) as fleet:
        runtime = fleet.connect(0, "sync")
        keys = train(runtime, rule)
        assert states(runtime, keys) == expected
        runtime.save(folder)
        runtime.close()
    with LocalFleet(1, 1, rules=["own_rules"], resume=folder) as fleet:
        runtime = fleet.connect(0, "sync")
        runtime.create(TableSpec("d", "dense", (9,), rule), np.zeros(9, np.float32))
        runtime.create(TableSpec("s", "sparse", (5,), rule, seed=4))
        assert states(runtime, keys) == expected
        runtime.close()
    write(SOURCE.replace("SCALE = 1.0", "SCALE = 0.25"))
    refusal = r"cannot be loaded here: rule 'slowing' is defined differently here"
    with (
        pytest.raises(ServerUnavailable, match=refusal),
        LocalFleet(1, 1, rules=["own_rules"], resume=folder),
    ):
        pass
    with pytest.raises(CheckpointError, match=refusal):
        EmbeddedRuntime().load(folder)


def test_a_worker_with_another_definition_is_refused(write: Write) -> None:
    """So is a table whose rule no server knows; no table is made."""
    rule = write(SOURCE)()
    assert reference_of(rule)  # of the text as it is now
    write(SOURCE.replace("w - h[0] * g", "w - h[0] * g * h[1]"))
    with LocalFleet(1, 1, rules=["own_rules"]) as fleet:
        RULES["slowing"] = type(rule)
        runtime = fleet.connect(0, "sync")
        with pytest.raises(RuleError, match="'slowing' is defined differently here"):
            runtime.create(TableSpec("s", "sparse", (5,), rule))
        runtime.close()
    with LocalFleet(1, 1) as fleet:
        runtime = fleet.connect(0, "sync")
        with pytest.raises(
            RuleError, match=r"rule 'slowing' is unknown; .* psfleet-launch --rules"
        ):
            runtime.create(TableSpec("s", "sparse", (5,), rule))
        runtime.close()


def test_a_module_that_cannot_be_imported(write: Write, tmp_path: Path) -> None:
    """The server ends with one sentence that names the module and the reason."""
    (tmp_path / "own_rules.py").write_text("import nothing_like_this\n")
    sentence = "'own_rules' cannot be imported .ModuleNotFoundError: .*nothing_like_this"
    with pytest.raises(RuleError, match=sentence):
        import_rules(["own_rules"])
    with (
        pytest.raises(ServerUnavailable, match="psfleet-server: the module of rules " + sentence),
        LocalFleet(1, 1, rules=["own_rules"]),
    ):
        pass


def test_what_a_definition_is(write: Write) -> None:
    """It changes with all that the rule uses, but not with comments; a version takes its place."""
    plain = reference_of(write(SOURCE)())
    assert plain.startswith("slowing@")
    for same in (
        SOURCE.replace(
            '    """The rate of a step."""\n', "    # Divided by the root of the step.\n"
        ),
        SOURCE + "\nUNUSED = 3\n",
    ):
        assert reference_of(write(same)()) == plain
    for before, after in (
        ("SCALE = 1.0", "SCALE = 1.5"),
        ("math.sqrt(step)", "step"),
        ("seen + h[1]", "seen - h[1]"),
        ("power: float = 0.5", "power: float = 0.6"),
    ):
        assert before in SOURCE
        assert reference_of(write(SOURCE.replace(before, after))()) != plain
    stated = SOURCE.replace('name = "slowing"', 'name = "slowing"\n    version = "2"')
    rule = write(stated)()
    assert reference_of(rule) == "slowing@2"
    assert make_rule("slowing@2", {"power": 0.5}) == rule


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("h[0] * g", "0.5 * g", r"slowing has the number 0\.5, which would widen"),
        ("h[0] * g", "SCALE * g", "slowing uses 'SCALE'; it may use its arguments"),
        ("h[0] * g", "math.exp(g)", r"uses 'math\.exp'; of math it may use math\.copysign"),
        ("slowing(", "pull(", "has a name that the kernels use themselves"),
        ("return slowing\n", "return lambda w, g, seen, h: (w, seen)\n", "must be defined by def"),
        (
            'name = "slowing"',
            'name = "sgd"',
            r"'sgd', which is that of psfleet\.core\.engine\.rules\.momentum\.SGD",
        ),
        ('name = "slowing"', 'name = "Slowing!"', "'Slowing!'; a name has lower-case letters"),
        (
            "    def scalar",
            f"{ADVANCE}    def scalar",
            "has `advance`; give it `direction`, `measure` and `combine`",
        ),
        (
            '(Slot("seen"),)\n',
            f'(Slot("seen", per_unit=True),)\n{ADVANCE}    direction = measure = combine = advance\n',
            "has `advance` and the slot 'seen' with per_unit=True",
        ),
        ("h[0] * g, seen", "h[0] * (g, g), seen", r"the kernels of Slowing\(.*\) do not compile"),
    ],
)
def test_rules_that_cannot_run(write: Write, before: str, after: str, sentence: str) -> None:
    """One sentence says what is wrong, when the rule or its first table is made."""
    text = SOURCE.replace(before, after)
    assert text != SOURCE
    if before == "slowing(":
        text = text.replace("return slowing\n", "return pull\n")
    with pytest.raises(RuleError, match=sentence):
        EmbeddedRuntime().create(
            TableSpec("d", "dense", (2,), write(text)()), np.ones(2, np.float32)
        )


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("import math", "import math, random", "has other numbers each time"),
        ("return rate(", "return (math.nan if step > 5 else 1.0) * rate(", "numbers of step 1000"),
        ('Slot("seen"),', 'Slot("seen"), Slot("seen"),', "two slots of one name"),
    ],
)
def test_the_conformance_test_finds(write: Write, before: str, after: str, sentence: str) -> None:
    """Numbers that are not the same each time, or no numbers after many steps; slots of one name."""
    text = SOURCE.replace(before, after)
    if "random" in after:
        text = text.replace("SCALE * learning_rate", "random.random() * learning_rate")
    with pytest.raises(AssertionError, match=sentence):
        check_rule(write(text)())


ROOT = Path(__file__).resolve().parents[2]
RULE = '''
"""Sign descent."""
from dataclasses import dataclass
from psfleet.core.engine.rules.rule import OptimizerSpec
from psfleet.core.engine.rules.rule import Rule

def lion(w, g, h):
    return (w - h[0] * g,)

@dataclass(frozen=True)
class Lion(Rule):
    """w -= scale * lr * g."""
    scale: float = 1.0
    weight_decay: float = 0.01
    name = "lion"
    optimizer = OptimizerSpec()

    def scalar(self):
        return lion

    def scalars(self, learning_rate, step):
        return (self.scale * learning_rate,)
'''
OF_A_USER = RULE.replace("Lion", "Tiger").replace("lion", "tiger")
CHILD = """
import psfleet.optimizer
import users_rules
import optimizer_stubs

print(psfleet.__file__)
print(psfleet.optimizer.Lion(0.5, scale=2.0).rule())
print(psfleet.optimizer.LionOptimizer is psfleet.optimizer.Lion, "Lion" in psfleet.optimizer.__all__)
print("class Lion(Optimizer):" in optimizer_stubs.text(), "Tiger" in optimizer_stubs.text())
"""


def test_a_new_file_is_enough(tmp_path: Path) -> None:
    """With one more file in psfleet/core/engine/rules, scripts have its optimizer and the stub lists it; the
    rules of a user's own module have none there."""
    rules = tmp_path / "psfleet" / "core" / "engine" / "rules"
    rules.mkdir(parents=True)
    for folder, leave in (
        (ROOT / "psfleet", "core"),
        (ROOT / "psfleet" / "core", "engine"),
        (ROOT / "psfleet" / "core" / "engine", "rules"),
        (ROOT / "psfleet" / "core" / "engine" / "rules", ""),
    ):
        made = tmp_path / folder.relative_to(ROOT)
        for entry in folder.iterdir():
            if entry.name not in (leave, "__pycache__"):
                (made / entry.name).symlink_to(entry)
    (rules / "lion.py").write_text(RULE)
    (tmp_path / "users_rules.py").write_text(OF_A_USER)
    path = f"import sys; sys.path[:0] = {[str(tmp_path), str(ROOT / 'tools')]!r}\n"
    child = ended([sys.executable, "-B", "-c", path + CHILD])
    assert child.stdout.splitlines() == [
        str(tmp_path / "psfleet" / "__init__.py"),
        "Lion(scale=2.0, weight_decay=0.01)",
        "True True",
        "True False",
    ], child.stderr
