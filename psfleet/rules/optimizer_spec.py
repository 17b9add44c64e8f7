"""What a rule declares beside its arithmetic: its optimizer's arguments, and its twins in torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["OptimizerSpec", "TorchSpec"]


@dataclass(frozen=True)
class OptimizerSpec:
    """How scripts construct the optimizer of a rule.

    An argument named like a field of the rule has that field's type and default. The other arguments
    are the same for every optimizer: `learning_rate`, which always comes first, `parameters`,
    `weight_decay`, `grad_clip`, `name`, `lazy_mode`.

    Attributes:
        learning_rate: Its default; None: the script must give it.
        arguments: Names of the arguments after `learning_rate`, in the order by place, separated by
            spaces; empty: the rule's fields, then "parameters weight_decay grad_clip name".
        older: The order of the reference's older documents, from the place of `parameters` on.
        ignored: Arguments that have no effect, for scripts written for the reference, and their
            defaults.
        lazy: Whether rows of a sparse parameter always rest while they have no gradient.
    """

    learning_rate: float | None = 0.001
    arguments: str = ""
    older: str = "regularization name"
    ignored: Mapping[str, float] = field(default_factory=dict)
    lazy: bool = False


@dataclass(frozen=True)
class TorchSpec:
    """An optimizer of torch that computes what a rule computes.

    Attributes:
        optimizer: Its name in torch.optim.
        options: torch's option for each field of the rule, in the fields' order, separated by spaces;
            `betas.0` is the first of the betas. A `weight_decay` that is not among them is an L2 decay.
        state: torch's names of the rule's slots, in their order, separated by spaces.
        when: Options and values that choose this rule among several for one optimizer.
        required: Options and values without which torch computes something else.
        hint: Option -> what to use in place of another value of it.
        dense: Whether it updates dense parameters.
        rows: Whether it takes sparse gradients.
        every_row: Whether it then updates the rows without a gradient too.
    """

    optimizer: str
    options: str = ""
    state: str = ""
    when: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    hint: Mapping[str, str] = field(default_factory=dict)
    dense: bool = True
    rows: bool = False
    every_row: bool = False
