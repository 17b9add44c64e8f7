"""Programs under Paddle's newer names (`paddle.static`)."""

from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.execution.inference import load_inference, save_inference
from psfleet.core.graph.program.backward import append_backward, gradients
from psfleet.core.graph.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from psfleet.core.graph.program.variable import Variable
from psfleet.fluid.static import nn
from psfleet.layers.inputs import data

__all__ = [
    "Executor",
    "Program",
    "Variable",
    "append_backward",
    "data",
    "default_main_program",
    "default_startup_program",
    "gradients",
    "load_inference",
    "nn",
    "program_guard",
    "save_inference",
]
