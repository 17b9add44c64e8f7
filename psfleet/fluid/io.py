"""Saving and loading of models, with Paddle's argument order. `executor` has no effect."""

from collections.abc import Sequence
from typing import Any

from psfleet import fleet
from psfleet.core.base.validation.annotations import FilePath, checked
from psfleet.core.graph.execution.inference import load_inference, save_inference
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.variable import Variable
from psfleet.data.feature_sets.feature_set import FeatureSet

__all__ = ["load_inference_model", "load_persistables", "save_inference_model", "save_persistables"]


@checked
def save_persistables(
    executor: Any, dirname: FilePath, main_program: Program | None = None
) -> None:
    """Write every table with its optimizer state, as fleet.save_persistables does."""
    fleet.save_persistables(dirname)


@checked
def load_persistables(
    executor: Any, dirname: FilePath, main_program: Program | None = None
) -> None:
    """Set every table from a folder of save_persistables, as fleet.load_model does."""
    fleet.load_model(dirname)


@checked
def save_inference_model(
    dirname: FilePath,
    feeded_var_names: Sequence[str],
    target_vars: Sequence[Variable],
    executor: Any = None,
    main_program: Program | None = None,
    features: FeatureSet | None = None,
) -> None:
    """Write a model for prediction: the program up to the targets, its weights, and `features` if given."""
    save_inference(dirname, feeded_var_names, target_vars, main_program, features)


@checked
def load_inference_model(
    dirname: FilePath, executor: Any = None
) -> tuple[Program, list[str], list[Variable]]:
    """Load a model for prediction. Returns the program, the names of its feeds, and its targets."""
    return load_inference(dirname)
