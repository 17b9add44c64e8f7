"""Paddle's names: Paddle scripts run on psfleet if only their imports are changed.

    import psfleet.fluid as fluid      # was: import paddle.fluid as fluid
    import psfleet.fluid as paddle     # was: import paddle (nn, optimizer, static, to_tensor, ...)

Most names are those of psfleet. These differ: `layers.data` adds the batch axis to the shape,
`layers.embedding` removes the last axis of ids [..., 1], and `metrics.Recall` is the recall of two classes.
The modules `dygraph`, `nn`, `static` and `io` exist only here.
"""

from psfleet import clip, initializer, optimizer, regularizer
from psfleet.core.graph.execution.executor import CPUPlace, CUDAPlace, Executor
from psfleet.core.graph.program import names as unique_name
from psfleet.core.graph.program.attribute import ParamAttr, create_parameter
from psfleet.core.graph.program.backward import append_backward, gradients
from psfleet.core.graph.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    in_eager_mode,
    program_guard,
)
from psfleet.core.graph.program.variable import Variable, no_grad, to_variable
from psfleet.fleet.file_datasets import DatasetFactory
from psfleet.fluid import dygraph, io, layers, learning_rate_scheduler, metrics, nn, static
from psfleet.fluid.layer_modules import load, load_dygraph, save, save_dygraph
from psfleet.fluid.tensor import (
    DataFeeder,
    arange,
    disable_static,
    enable_static,
    ones,
    randint,
    randn,
    seed,
    to_tensor,
    uniform,
    zeros,
)
from psfleet.layers import concat, matmul, mean, reshape
from psfleet.layers.inputs import data

in_dygraph_mode = in_eager_mode

__all__ = [
    "CPUPlace",
    "CUDAPlace",
    "DataFeeder",
    "DatasetFactory",
    "Executor",
    "ParamAttr",
    "Program",
    "Variable",
    "append_backward",
    "arange",
    "clip",
    "concat",
    "create_parameter",
    "data",
    "default_main_program",
    "default_startup_program",
    "disable_static",
    "dygraph",
    "enable_static",
    "gradients",
    "in_dygraph_mode",
    "initializer",
    "io",
    "layers",
    "learning_rate_scheduler",
    "load",
    "load_dygraph",
    "matmul",
    "mean",
    "metrics",
    "nn",
    "no_grad",
    "ones",
    "optimizer",
    "program_guard",
    "randint",
    "randn",
    "regularizer",
    "reshape",
    "save",
    "save_dygraph",
    "seed",
    "static",
    "to_tensor",
    "to_variable",
    "uniform",
    "unique_name",
    "zeros",
]
