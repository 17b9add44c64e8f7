"""Feature sets in TOML files."""

from pathlib import Path

from psfleet.entry import CapacityEntry, CountFilterEntry, DecayedFrequency, TTLEntry
from psfleet.features import Feature, Number, load_features
from psfleet.initializer import Normal

FILE = """
[tables.users]
dim = 16
optimizer = { kind = "Adagrad", learning_rate = 0.05, epsilon = 1e-8 }
initializer = { kind = "Normal", scale = 0.02 }
entry = [{ kind = "CountFilterEntry", count_filter = 3 }, { kind = "TTLEntry", steps = 100 }]

[tables.items]
dim = 8
entry = { kind = "CapacityEntry", rows = 9, policy = { kind = "DecayedFrequency", half_life = 7.0 } }

[features.user]
table = "users"

[features.friends]
table = "users"
pooling = "mean"
last = 50

[features.age]
default = -1.0

[features.item]
table = "items"
hashed = true
"""


def test_load(tmp_path: Path) -> None:
    """The file's features are in its order, with the tables that they name."""
    path = tmp_path / "features.toml"
    path.write_text(FILE)
    features = load_features(path)
    assert list(features.features) == ["user", "friends", "age", "item"]
    user, friends, age, item = features
    assert isinstance(user, Feature)
    assert isinstance(friends, Feature)
    assert isinstance(item, Feature)
    assert user.table is friends.table is features.tables["users"]
    assert (friends.pooling, friends.last, item.hashed) == ("mean", 50, True)
    assert age == Number("age", default=-1.0)
    assert user.table.initializer == Normal(scale=0.02)
    assert user.table.entry == CountFilterEntry(3) & TTLEntry(steps=100)
    assert user.table.optimizer.get_lr() == 0.05
    assert user.table.optimizer.rule().epsilon == 1e-8
    assert features.tables["items"].optimizer is None
    assert features.tables["items"].entry == CapacityEntry(9, policy=DecayedFrequency(7.0))
