"""A rule of psfleet is one file: its optimizer and what type checkers read follow from it."""

import sys
from pathlib import Path

from tests.programs import ended

ROOT = Path(__file__).resolve().parents[2]
RULE = '''
"""Sign descent."""
from dataclasses import dataclass
from psfleet.rules.rule import OptimizerSpec
from psfleet.rules.rule import Rule

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
    """With one more file in psfleet/rules, scripts have its optimizer and the stub lists it; the rules of
    a user's own module have none there."""
    rules = tmp_path / "psfleet" / "rules"
    rules.mkdir(parents=True)
    for folder, leave in ((ROOT / "psfleet", "rules"), (ROOT / "psfleet" / "rules", "")):
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
