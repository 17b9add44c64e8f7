"""Declaration of a rule beside its arithmetic: its optimizer's arguments, and its twins in torch.

An `epsilon` of 0 is taken and the formula computed as it stands, as in the reference: a value that has had
no gradient but 0 becomes 0 / 0, NaN. Nothing is put in its place; keep it above 0 where that can be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from psfleet.errors import RuleError
from psfleet.rules.finding_rules import RULES, NamedDefinition
from psfleet.validation.annotations import Range


@dataclass(frozen=True)
class OptimizerSpec:
    """Constructor of a rule's optimizer, as scripts see it.

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
        lazy: True if rows of a sparse parameter always rest while they have no gradient.
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
        dense: True if it updates dense parameters.
        rows: True if it takes sparse gradients.
        every_row: True if it then updates the rows without a gradient too.
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


DecayRate = Annotated[float, Range(0, 1, high_open=True)]
"""The decay rate of a running mean."""
SlotFormat = Literal["float32", "bfloat16", "int8"]
"""Storage of a slot's values in a row."""
UnitInterval = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class Slot:
    """One state value that a rule keeps beside each weight.

    Attributes:
        name: Name as in state dicts.
        initial: Its first value.
        per_unit: One value for the whole unit (see Rule.unit) instead of one per weight.
        smallest: The smallest format in which rows of a sparse table may store it, should the table ask for
            one. The rule then gets values that are right on average, and a value near 0 may become 0:
            int8 with steps of at least 1/127 of the row's largest value, bfloat16 only where it is below
            2^-133. So what the rule divides by must not be int8, and a count must be float32.
    """

    name: str
    initial: float = 0.0
    per_unit: bool = False
    smallest: SlotFormat = "float32"

    def __post_init__(self) -> None:
        if self.smallest not in get_args(SlotFormat):
            raise RuleError(
                f"slot {self.name!r} has smallest={self.smallest!r}; it must be one of "
                f"{', '.join(get_args(SlotFormat))}"
            )


@dataclass(frozen=True)
class Rule(NamedDefinition):
    """An optimizer's arithmetic for one weight. Knows nothing of tables, threads or the wire.

    A subclass is a frozen dataclass whose fields are the hyperparameters, see NamedDefinition. The learning
    rate is not a field: it comes with each push.

    The scalar function returned by `scalar()` is a module-level function
    `rule(w, g, *slots, h) -> (w, *slots)` whose source text is inlined into the generated kernels,
    so it may name only its arguments and `math`. `h` is the tuple made by `scalars()`, all float32:
    a literal in the function would widen the arithmetic to float64.

    A rule that needs sums over several weights (a norm) names its unit and adds two functions under
    the same terms: `measure(w, g, *slots, h) -> (float, ...)`, what to sum over the unit, and
    `combine(*sums, count, h) -> (float, ...)`, which makes of the sums and of the unit's size the
    values that are appended to h before the scalar function runs. `measure` sees the slots as they
    are before the update. A rule that sums over what it makes of its slots also has
    `advance(w, g, *slots, h) -> slots`, their update, which runs first, and
    `direction(w, *slots, h) -> (u,)`, of the updated ones. u takes the place of g, and the other two
    have no slots: `measure(w, u, h)`, `rule(w, u, h) -> (w,)`.

    Attributes:
        unit: Unit of one update. "element": every weight for itself. "row": a row of a sparse
            table, or what one index of a dense array's first axis names. "parameter": the whole
            dense array; in a sparse table, whose rows are on many servers, still the row.
        optimizer: Constructor of the rule's optimizer; None: only other code makes it.
        torch: The optimizers of torch that compute the same.
        counts: True if pushes are counts: servers apply each push in full. They neither average the
            pushes of a round nor correct, round or shrink anything, and geo mode applies the rule too.
    """

    word: ClassVar[str] = "rule"
    known: ClassVar[dict[str, Any]] = RULES
    unit: ClassVar[str] = "element"
    optimizer: ClassVar[OptimizerSpec | None] = None
    torch: ClassVar[tuple[TorchSpec, ...]] = ()
    counts: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The state slots, in the order in which the scalar function takes and returns them."""
        return ()

    @property
    def turns(self) -> int:
        """Number of the last slots that take turns; 0: none.

        The scalar function sees only one of them: number (step - 1) % turns.
        """
        return 0

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        """The scalar function for these hyperparameters."""
        raise NotImplementedError

    def measure(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function to sum over the unit; None: the rule needs no sums."""
        return None

    def advance(self) -> Callable[..., tuple[float, ...]] | None:
        """The slots' update, where it runs before `measure`; None: the scalar function does it."""
        return None

    def direction(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function used for the gradient after `advance`; None: that of `advance`."""
        return None

    def combine(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function that adds the sums to the numbers of the batch; None: that of `measure`."""
        return None

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        """Numbers that are the same for a whole batch, computed in double precision.

        Args:
            learning_rate: Rate of this push, already scaled for the parameter.
            step: Number of updates that the table has had, this one included; the first is 1.
        """
        raise NotImplementedError

    def resting_scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        """Return the `scalars` of rows that a step does not name, in a table that updates every row."""
        return self.scalars(learning_rate, step)
