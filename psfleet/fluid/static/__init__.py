"""Programs under their newer names."""

from psfleet.execution.executor import Executor
from psfleet.execution.inference import load_inference, save_inference
from psfleet.fluid.static import nn
from psfleet.layers.inputs import data
from psfleet.program.backward import append_backward, gradients
from psfleet.program.program import (
    Program,
    default_main_program,
    default_startup_program,
    program_guard,
)
from psfleet.program.variable import Variable

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
