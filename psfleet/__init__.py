"""psfleet: parameter-server training for models with large embedding tables.

Names are loaded when they are first used, so that a server process never loads the optimizers or
the graph, and `import psfleet` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from psfleet.errors import install_hook

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
    from psfleet.client import Client, DenseTable, SparseTable, connect
    from psfleet.errors import PsfleetError
    from psfleet.execution.executor import Executor
    from psfleet.fleet import reset
    from psfleet.parameters.parameter import Parameter, SparseGrad
    from psfleet.program.attribute import ParamAttr
    from psfleet.program.program import (
        Program,
        default_main_program,
        default_startup_program,
        program_guard,
    )
    from psfleet.program.variable import Variable, to_variable

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
    "Client": "psfleet.client",
    "DenseTable": "psfleet.client",
    "Executor": "psfleet.execution.executor",
    "ParamAttr": "psfleet.program.attribute",
    "Parameter": "psfleet.parameters.parameter",
    "Program": "psfleet.program.program",
    "PsfleetError": "psfleet.errors",
    "SparseGrad": "psfleet.parameters.parameter",
    "SparseTable": "psfleet.client",
    "Variable": "psfleet.program.variable",
    "connect": "psfleet.client",
    "default_main_program": "psfleet.program.program",
    "default_startup_program": "psfleet.program.program",
    "program_guard": "psfleet.program.program",
    "reset": "psfleet.fleet",
    "to_variable": "psfleet.program.variable",
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
