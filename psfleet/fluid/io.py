"""Saving and loading of models, with Paddle's order of arguments. The argument `executor` has no effect."""

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
    """Write all tables, including optimizer state, to a folder, as fleet.save_persistables does."""
    fleet.save_persistables(dirname)


@checked
def load_persistables(
    executor: Any, dirname: FilePath, main_program: Program | None = None
) -> None:
    """Load all tables from a folder that `save_persistables` has written, as fleet.load_model does."""
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
    """Write a model for prediction, as fleet.save_inference_model does.

    Args:
        dirname: Folder.
        feeded_var_names: Names of the inputs to feed.
        target_vars: Variables to predict.
        executor: Has no effect.
        main_program: Program of the targets, or None for the default main program.
        features: Feature set to store with the model, or None.
    """
    save_inference(dirname, feeded_var_names, target_vars, main_program, features)


@checked
def load_inference_model(
    dirname: FilePath, executor: Any = None
) -> tuple[Program, list[str], list[Variable]]:
    """Load a model that `save_inference_model` has written.

        program, feed_names, targets = fluid.io.load_inference_model("served", exe)
        results = exe.run(program, feed=feed, fetch_list=targets)

    Returns:
        The program, the names of its inputs, and its targets.
    """
    return load_inference(dirname)
