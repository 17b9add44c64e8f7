"""Optimizers of tables that are pushed to without them: plain tables, torch's embeddings."""

from typing import Any

from psfleet.errors import ConfigError
from psfleet.optimizer.dgc import DGCMomentum
from psfleet.optimizer.lookahead import LookAhead
from psfleet.optimizer.optimizer import Optimizer

__all__ = ["check_outside"]


def check_outside(owner: str, optimizer: Any) -> None:
    """Refuse an optimizer whose rule alone does not do all that it promises.

    Args:
        owner: What it is for, for messages.
    """
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            f"the optimizer of {owner} is {optimizer!r}; it must be one of psfleet.optimizer"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, DGCMomentum | LookAhead):
        raise ConfigError(
            f"the optimizer of {owner} is {kind}, which works on the worker; pushes go straight to "
            "the servers: take any other"
        )
    if optimizer.common()["grad_clip"] is not None:
        raise ConfigError(
            f"the {kind} of {owner} has a grad_clip, which would not be applied; clip what you push"
        )
