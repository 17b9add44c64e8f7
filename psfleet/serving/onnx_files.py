"""Writing of ONNX models to files, for programs and for PyTorch modules.

A psfleet table does not fit into an ONNX graph, so a graph has the rows of each lookup as an input, and the
file's metadata names the input's table. onnx_programs.py makes the graph of a program, and
psfleet.torch.onnx_modules that of a PyTorch module; both end here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import optional_module


def onnx_module() -> Any:
    """Import the package onnx.

    Raises:
        ConfigError: The package is not installed.
    """
    return optional_module("onnx", "ONNX files need", "onnx", "onnx")


def save_model(model: Any, tables: Mapping[str, str], where: Path) -> None:
    """Check an ONNX model with onnx's own checker and write it to a file.

    Args:
        model: The `onnx.ModelProto`. Its metadata is set.
        tables: Maps each input that takes looked-up rows to the name of the table of the rows.
        where: File to write.
    """
    onnx = onnx_module()
    onnx.helper.set_model_props(model, {f"rows of {name}": table for name, table in tables.items()})
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, str(where))
