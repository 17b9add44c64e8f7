"""psfleet: parameter-server training for models with large embedding tables.

Names are loaded when they are first used, so that a server process never loads the optimizers or
the graph, and `import psfleet` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import install_hook

if TYPE_CHECKING:
    __version__: str
    # Not `from psfleet import ...`: in an import cycle mypy takes such names for missing.
    import psfleet.fleet as fleet
    import psfleet.fluid as fluid
    import psfleet.initializer as initializer
    import psfleet.layers as layers
    import psfleet.metrics as metrics
    import psfleet.optimizer as optimizer
    import psfleet.serving as serving
    from psfleet.core.base.errors import PsfleetError
    from psfleet.core.client import Client, DenseTable, SparseTable, connect
    from psfleet.core.engine.gradients import SparseGrad
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
    "Client",
    "DenseTable",
    "Executor",
    "ParamAttr",
    "Parameter",
    "Program",
    "PsfleetError",
    "SparseGrad",
    "SparseTable",
    "Variable",
    "connect",
    "default_main_program",
    "default_startup_program",
    "fleet",
    "fluid",
    "initializer",
    "layers",
    "metrics",
    "optimizer",
    "program_guard",
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
    "PsfleetError": "psfleet.core.base.errors",
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


install_hook()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("psfleet")
    if name not in __all__:
        raise AttributeError(f"module 'psfleet' has no attribute {name!r}")
    home = _HOMES.get(name)
    if home is None:
        return importlib.import_module(f"psfleet.{name}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
