"""Strategies: what they may say, who has the last word, and what the switches do."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet import fleet, optimizer
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.engine.worker_state import PLACE, read_states
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import current, using
from psfleet.core.runtime.strategy import Settings, load_strategy_file, resolve
from psfleet.fleet import DistributedStrategy, Fleet
from psfleet.fleet.data_loops import DataLoops
from psfleet.optimizer.distributed import DistributedOptimizer


@pytest.fixture(autouse=True)
def fresh_runtime() -> Iterator[None]:
    """Each test trains on tables of its own."""
    before = current().use(None)
    yield
    current().use(before)


def distributed(inner: optimizer.Optimizer, **parts: object) -> DistributedOptimizer:
    return DistributedOptimizer(inner, Settings.from_parts(parts))  # type: ignore[arg-type]


def test_single_keys_are_overridden() -> None:
    """The launcher's word counts key by key; what it does not say is the script's."""
    script = DistributedStrategy(a_sync=True)
    script.gradient_merge = True
    script.gradient_merge_configs = {"k_steps": 4, "avg": False}
    settings = resolve(script, '{"gradient_merge": {"k_steps": 2}}')
    assert settings.consistency.mode == "async"
    assert settings.gradient_merge is not None
    assert (settings.gradient_merge.k_steps, settings.gradient_merge.avg) == (2, False)


def test_strategy_file(tmp_path: Path) -> None:
    """A TOML file says the same as the script's switches."""
    file = tmp_path / "strategy.toml"
    file.write_text('[consistency]\nmode = "async"\n[lamb]\nlamb_weight_decay = 0.1\n')
    settings = Settings.from_parts(load_strategy_file(str(file)))
    assert settings.consistency.mode == "async"
    assert settings.lamb is not None
    assert settings.lamb.lamb_weight_decay == 0.1


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[consistency]\nmode = 'often'\n", "often"),
        ("[consistency]\nspeed = 1\n", "speed"),
        ("[turbo]\n", "turbo"),
        ("gradient_merge = 3\n", "3"),
        ("[gradient_merge]\nk_steps = 0\n", "0"),
        ("[gradient_merge]\nk_steps = 'two'\n", "two"),
        ("[lars]\n[lamb]\n", "contradict"),
        ("[dgc]\nsparsity = [0.9, 1.0]\n", r"dgc sparsity is \[0.9, 1.0\]"),
        ("[dgc]\nrampup_begin_step = -1\n", "dgc rampup_begin_step is -1"),
        ("[dgc]\nrampup_step = 0\n", "dgc rampup_step is 0"),
        ("[lars]\nlars_coeff = nan\n", "lars lars_coeff is nan"),
        ("[lars]\nepsilon = -0.1\n", "lars epsilon is -0.1"),
        ("[lamb]\nlamb_weight_decay = inf\n", "lamb lamb_weight_decay is inf"),
        ("[lars\n", "cannot be read"),
    ],
)
def test_bad_files_are_one_clear_sentence(tmp_path: Path, text: str, word: str) -> None:
    """Unknown, ill-typed or contradictory settings are refused, the value quoted."""
    file = tmp_path / "strategy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=word):
        load_strategy_file(str(file))


def test_gradient_merge_pushes_the_mean_of_k_steps() -> None:
    """Four steps with k_steps 2 are two updates by the means, dense and sparse alike."""
    dense, rows = (
        Parameter("w", np.zeros(3)),
        Parameter("rows", shape=(-1, 2), sparse=True, distributed=True),
    )
    first = rows.lookup(np.array([5]))
    merged = distributed(optimizer.SGD(1.0), gradient_merge={"k_steps": 2})
    for value in (1.0, 3.0, 5.0, 7.0):
        gradient = SparseGrad(np.array([5]), np.full((1, 2), value, np.float32))
        merged.apply_gradients([(dense, np.full(3, value, np.float32)), (rows, gradient)])
    assert dense.numpy().tolist() == [-8.0, -8.0, -8.0]
    assert np.allclose(rows.lookup(np.array([5])), first - 8)
    assert merged.state_dict()["w.step"] == 2


@pytest.mark.parametrize(
    "wrap", [lambda inner: inner, lambda inner: optimizer.LookAhead(inner, k=9)]
)
def test_gradients_that_wait_are_not_left_out(
    tmp_path: Path, wrap: Callable[[optimizer.Optimizer], optimizer.Optimizer]
) -> None:
    """Whatever is saved between two pushes of merged gradients, by the script or in a snapshot of what it
    remembers, is refused or belongs to the last push. `push_merged` pushes what waits."""
    with using(EmbeddedRuntime()) as process:
        w = Parameter("w", np.zeros(1))
        opt = distributed(wrap(optimizer.SGD(0.1)), gradient_merge={"k_steps": 3})
        loops = DataLoops(0, 1, lambda: None, snapshots=True)
        saves = (
            opt.state_dict,
            lambda: fleet.save_persistables(str(tmp_path / "saved")),
            fleet.snapshot,
            lambda: psfleet.connect().save(tmp_path / "client"),
        )
        for number in loops.shard(range(1, 8), True):
            opt.apply_gradients([(w, np.ones(1, np.float32))])
            if number == 3:
                before = opt.state_dict()
            if number == 5:
                kept = read_states(json.loads(loops._worker_state.state_at(0)))
                assert kept[PLACE]["item"] == 3
                for save in saves:
                    with pytest.raises(UsageError, match=r"gradients of 2 step.*opt\.push_merged"):
                        save()
        assert w.numpy() == np.float32(-0.2)
        opt.push_merged()
        assert w.numpy() == np.float32(-0.2) - np.float32(0.1)
        fleet.save_persistables(str(tmp_path / "saved"))
        opt.apply_gradients([(w, np.ones(1, np.float32))])
        opt.set_state_dict(before)
        opt.push_merged()
        assert w.numpy() == np.float32(-0.2) - np.float32(0.1)
        opt.apply_gradients([(w, np.ones(1, np.float32))])
        fleet.load_model(str(tmp_path / "saved"))
        assert process.waiting_steps == 0


@pytest.mark.parametrize(
    ("part", "inner", "kind"),
    [
        ("dgc", lambda: optimizer.Momentum(0.1), optimizer.DGCMomentum),
        ("lars", lambda: optimizer.Momentum(0.1), optimizer.LarsMomentum),
        ("lamb", lambda: optimizer.Adam(0.1), optimizer.Lamb),
    ],
)
def test_switches_replace_the_optimizer(part: str, inner: object, kind: type) -> None:
    """dgc, lars and lamb train with their optimizer, at the same rate."""
    wrapped = distributed(inner(), **{part: {}})  # type: ignore[operator]
    assert type(wrapped.optimizer) is kind
    assert wrapped.get_lr() == 0.1
    parameter = Parameter("w", np.ones(4))
    wrapped.apply_gradients([(parameter, np.ones(4, np.float32))])
    assert not np.array_equal(parameter.numpy(), np.ones(4))


@pytest.mark.parametrize("part", ["dgc", "lars", "lamb"])
def test_switches_need_their_optimizer(part: str) -> None:
    """A switch that does not fit the script's optimizer is refused and names it."""
    with pytest.raises(ConfigError, match="SGD"):
        distributed(optimizer.SGD(0.1), **{part: {}})


def test_fleet_passes_the_strategy_on() -> None:
    """fleet.distributed_optimizer trains as its strategy says."""
    fleet = Fleet()
    fleet.init()
    strategy = DistributedStrategy(gradient_merge=True, gradient_merge_configs={"k_steps": 3})
    wrapped = fleet.distributed_optimizer(optimizer.SGD(1.0), strategy)
    assert wrapped.settings.gradient_merge is not None
    assert wrapped.optimizer.merger is not None
    fleet.stop_worker()


def test_configurations_read_as_the_reference_s() -> None:
    """Before anything is set, a part's configuration has the defaults; reading one back changes nothing."""
    strategy = DistributedStrategy()
    assert strategy.gradient_merge_configs == {"k_steps": 1, "avg": True}
    assert strategy.a_sync_configs == {"k_steps": -1}
    strategy.gradient_merge_configs = {"k_steps": 4}
    assert strategy.gradient_merge_configs == {"k_steps": 4, "avg": True}
    for part, value in {"a_sync": True, "wire": "bf16", "gradient_merge": True}.items():
        setattr(strategy, part, value)
        before = resolve(strategy, "")
        setattr(strategy, f"{part}_configs", getattr(strategy, f"{part}_configs"))
        assert resolve(strategy, "") == before
    with pytest.raises(TypeError):
        strategy.gradient_merge_configs["k_steps"] = 2


@pytest.mark.parametrize(
    ("part", "said", "word"),
    [
        ("gradient_merge", {"k_stepz": 4}, "'gradient_merge' has no setting 'k_stepz'"),
        ("gradient_merge", {"k_steps": 0}, "gradient_merge k_steps is 0"),
        ("a_sync", {"k_stepz": 4}, "a_sync_configs has no setting 'k_stepz'"),
        ("dgc", {"rampup_step": "x"}, "dgc rampup_step is 'x'"),
        ("pipeline", ["x"], "pipeline_configs is .'x'.; it must be a dict"),
    ],
)
def test_a_part_that_is_off_is_checked(part: str, said: object, word: str) -> None:
    """What a part could not take is refused where it is set, before the part is on."""
    with pytest.raises(ConfigError, match=word):
        setattr(DistributedStrategy(), f"{part}_configs", said)
