"""Choices that several parts of psfleet share."""

from typing import Literal

Mode = Literal["sync", "async", "ssp", "geo", "half-async"]
"""Names of the consistency modes, written by tools/generate_stubs.py."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Device = Literal["cpu", "cuda", "disk"]
"""Memory that holds a table. The kinds, and their names: psfleet/tables/memory_choice.py."""
DEVICE_PLACES: dict[Device, str] = {
    "cpu": "in host memory",
    "cuda": "in the memory of an NVIDIA GPU",
    "disk": "in files of --server-disk",
}
"""Name of each in texts of settings."""
Format = Literal["float32", "bfloat16", "int8"]
RowForm = Literal["float32", "bfloat16", "int8", "int4"]
"""Form in which rows are kept for prediction; the last two have a scale for each row."""
ArrayFormat = Literal["npz", "safetensors", "torch"]
"""Kind of the file of arrays of an exported model."""
ExportFormat = Literal[ArrayFormat, "onnx", "faiss"]
"""Likewise, or safetensors with a graph or an index beside it."""
