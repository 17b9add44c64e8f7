"""What operations ask of the dtypes of their inputs."""

from typing import TYPE_CHECKING

from psfleet.errors import ShapeError

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["need_floats", "need_one_dtype"]


def need_floats(what: str, *inputs: "Variable") -> None:
    """Refuse inputs of whole numbers, and floats of different widths."""
    for x in inputs:
        if x.dtype.kind != "f":
            raise ShapeError(f"{what} of {x.name!r} needs floats, not {x.dtype}; use layers.cast")
    need_one_dtype(what, *inputs)


def need_one_dtype(what: str, *inputs: "Variable") -> None:
    """Refuse inputs of different dtypes: nothing is widened behind the user's back."""
    for other in inputs[1:]:
        if other.dtype != inputs[0].dtype:
            raise ShapeError(
                f"{what} of {inputs[0].name!r} ({inputs[0].dtype}) and {other.name!r} "
                f"({other.dtype}): the dtypes differ; use layers.cast on one"
            )
