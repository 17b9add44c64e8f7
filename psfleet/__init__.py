"""psfleet: parameter-server training for models with large embedding tables.

Names are loaded when they are first used, so that a server process never loads the optimizers or
the graph, and `import psfleet` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import __all__ as _ERRORS
from psfleet.core.base.errors import install_hook

if TYPE_CHECKING:
    __version__: str
    # With `from psfleet import ...` mypy would report these names as missing, because of the import cycle.
    import psfleet.checkpoint as checkpoint
    import psfleet.clip as clip
    import psfleet.data as data
    import psfleet.features as features
    import psfleet.fleet as fleet
    import psfleet.fluid as fluid
    import psfleet.initializer as initializer
    import psfleet.layers as layers
    import psfleet.metrics as metrics
    import psfleet.optimizer as optimizer
    import psfleet.regularizer as regularizer
    import psfleet.serving as serving
    from psfleet.core.base.errors import (
        AccessDenied,
        CheckpointError,
        ConfigError,
        DeadlineExceeded,
        Fenced,
        FrameError,
        Gap,
        IdError,
        LaneLost,
        Later,
        LimitExceeded,
        LogError,
        NoRoom,
        NotReady,
        ProtocolError,
        PsfleetError,
        RuleError,
        ServerUnavailable,
        ShapeError,
        TableConflict,
        UnknownTable,
        UsageError,
        WrongType,
    )
    from psfleet.core.client import Client, DenseTable, SparseTable, connect
    from psfleet.core.engine.gradients import SparseGrad
    from psfleet.core.engine.rules import DecayRate, OptimizerSpec, Rule, Slot
    from psfleet.core.engine.schema.entry import (
        LFU,
        LRU,
        CapacityEntry,
        CountFilterEntry,
        DecayedFrequency,
        EvictionPolicy,
        EvictionStreamEntry,
        ProbabilityEntry,
        ShowClickEntry,
        TTLEntry,
    )
    from psfleet.core.graph.execution.executor import Executor
    from psfleet.core.graph.parameters.parameter import Parameter
    from psfleet.core.graph.program.attribute import ParamAttr
    from psfleet.core.graph.program.program import (
        Program,
        default_main_program,
        default_startup_program,
        program_guard,
    )
    from psfleet.core.graph.program.variable import Variable, to_variable
    from psfleet.fleet import reset

__all__ = [
    "LFU",
    "LRU",
    "AccessDenied",
    "CapacityEntry",
    "CheckpointError",
    "Client",
    "ConfigError",
    "CountFilterEntry",
    "DeadlineExceeded",
    "DecayRate",
    "DecayedFrequency",
    "DenseTable",
    "EvictionPolicy",
    "EvictionStreamEntry",
    "Executor",
    "Fenced",
    "FrameError",
    "Gap",
    "IdError",
    "LaneLost",
    "Later",
    "LimitExceeded",
    "LogError",
    "NoRoom",
    "NotReady",
    "OptimizerSpec",
    "ParamAttr",
    "Parameter",
    "ProbabilityEntry",
    "Program",
    "ProtocolError",
    "PsfleetError",
    "Rule",
    "RuleError",
    "ServerUnavailable",
    "ShapeError",
    "ShowClickEntry",
    "Slot",
    "SparseGrad",
    "SparseTable",
    "TTLEntry",
    "TableConflict",
    "UnknownTable",
    "UsageError",
    "Variable",
    "WrongType",
    "checkpoint",
    "clip",
    "connect",
    "data",
    "default_main_program",
    "default_startup_program",
    "features",
    "fleet",
    "fluid",
    "initializer",
    "layers",
    "metrics",
    "optimizer",
    "program_guard",
    "regularizer",
    "reset",
    "serving",
    "to_variable",
]

_HOMES = {
    "Client": "psfleet.core.client",
    "DenseTable": "psfleet.core.client",
    "Executor": "psfleet.core.graph.execution.executor",
    "ParamAttr": "psfleet.core.graph.program.attribute",
    "Parameter": "psfleet.core.graph.parameters.parameter",
    "Program": "psfleet.core.graph.program.program",
    "SparseGrad": "psfleet.core.engine.gradients",
    "SparseTable": "psfleet.core.client",
    "Variable": "psfleet.core.graph.program.variable",
    "connect": "psfleet.core.client",
    "default_main_program": "psfleet.core.graph.program.program",
    "default_startup_program": "psfleet.core.graph.program.program",
    "program_guard": "psfleet.core.graph.program.program",
    "reset": "psfleet.fleet",
    "to_variable": "psfleet.core.graph.program.variable",
}

_HOMES |= dict.fromkeys(_ERRORS, "psfleet.core.base.errors")
_HOMES |= dict.fromkeys(
    [
        "CapacityEntry",
        "CountFilterEntry",
        "DecayedFrequency",
        "EvictionPolicy",
        "EvictionStreamEntry",
        "LFU",
        "LRU",
        "ProbabilityEntry",
        "ShowClickEntry",
        "TTLEntry",
    ],
    "psfleet.core.engine.schema.entry",
)
_HOMES |= dict.fromkeys(["DecayRate", "OptimizerSpec", "Rule", "Slot"], "psfleet.core.engine.rules")

install_hook()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("psfleet")
    # `from psfleet import *` must not load PyTorch, so `torch` is not in `__all__`.
    if name not in __all__ and name != "torch":
        raise AttributeError(f"module 'psfleet' has no attribute {name!r}")
    home = _HOMES.get(name)
    if home is None:
        return importlib.import_module(f"psfleet.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
