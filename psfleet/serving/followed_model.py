"""A model whose weights are those of a running job."""

import os
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override

from psfleet.errors import UsageError
from psfleet.feature_sets.feature_set import FeatureSet
from psfleet.serving.follower import Follower
from psfleet.serving.model import Model, features_of


class RowsModel(Model):
    """The rows of a job without a model: they can be looked up.

    Args:
        rows: Source of the rows.
    """

    def __init__(self, rows: Follower) -> None:
        self.name = "rows"
        self.features = None
        self.rows = rows

    @override
    def __call__(self, features: Any) -> NoReturn:
        raise UsageError("this service follows a job without a model, so it gives rows only")


def follow(
    job: str | os.PathLike[str] | Sequence[str],
    model: str = "",
    features: FeatureSet | str | None = None,
    **settings: Any,
) -> Model:
    """A model with the weights of a running job, which stay up to date; close its `rows` in the end.

    Args:
        job: The job, as for Follower.
        model: The folder of an inference model, or MODULE:NAME, as for `psfleet.serving.load`; "": none.
        features: Its inputs, likewise.
        settings: Further arguments of Follower.

    Raises:
        PsfleetError: The job does not answer, or there is no such model.
    """
    rows = Follower(job, **settings)
    try:
        if not model:
            return RowsModel(rows)
        return Model(model, features_of(model, features), rows)
    except BaseException:
        rows.close()
        raise
