"""Base class of update rules, the arithmetic of optimizers, and the declarations that go with a rule.

Open this file to write an optimizer: subclass `Rule` and give it one scalar function, which updates one
weight. Kernels for dense arrays, sparse rows and GPUs are generated from this function (docs/rules.md).
momentum.py has short examples.

A rule also declares the constructor that scripts see (`OptimizerSpec`) and the optimizers of torch that
compute the same (`TorchSpec`). `check_functions` refuses functions that cannot be compiled into kernels. "The
reference" is Paddle, whose optimizers psfleet reproduces.

An `epsilon` of 0 is accepted, and formulas are computed as written, as in the reference. The update of a
weight whose gradients were all 0 is then 0 / 0, and the weight becomes NaN. Keep epsilon above 0 if that can
happen.
"""

import ast
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args

from psfleet.core.base.errors import RuleError
from psfleet.core.base.validation.annotations import Range
from psfleet.core.engine.rules.named_definition import NamedDefinition

_parsing = threading.Lock()  # see tree_of
RULES: dict[str, type["Rule"]] = {}
"""All rules that this process knows, by name. Defining a subclass of Rule with a name adds the rule."""
DecayRate = Annotated[float, Range(0, 1, high_open=True)]
"""Decay rate of a running mean, from 0 to below 1."""
SlotFormat = Literal["float32", "bfloat16", "int8"]
"""Format in which a row stores the values of a slot."""
UnitInterval = Annotated[float, Range(0, 1)]
# Functions of `math` that rules may call. They are bit-identical in compiled code, in NumPy and on a GPU,
# except that on a GPU the last bit of `pow` may differ.
_MATH = ("copysign", "pow", "sqrt")
_BUILT_IN = ("abs", "max", "min")
# Names that the generated text around a rule's functions uses. The functions are defined in the same module,
# so a function with one of these names would replace a function that the text calls.
_KERNELS_OWN = re.compile(
    r"[a-z]\d*|add|apply|combined|end|fold(ed)?|gradient|helper|inlined|kernel|lanes|pull|push|rest|start|turn"
    r"|whole|(load|read|store|find|fill|prefetch|insert|first)(_\w+)?|(widen|narrow)_row|row_bits"
)


@dataclass(frozen=True)
class OptimizerRules:
    """Rules that one optimizer uses, and its treatment of sparse rows that have no gradient in a step.

    Attributes:
        rule: Rule for dense gradients, and for all gradients if `by_rows` is None.
        by_rows: Rule for gradients by rows, or None to use `rule`.
        lazy: True if a step leaves rows without a gradient unchanged.
        every_row: True to update all rows in each step, even of parameters that accept any id.
    """

    rule: "Rule"
    by_rows: "Rule | None" = None
    lazy: bool = False
    every_row: bool = False


@dataclass(frozen=True)
class OptimizerSpec:
    """Constructor of a rule's optimizer, as scripts see it.

    An argument with the name of a field of the rule has the type and default of the field. The other
    arguments are the same for every optimizer: `learning_rate`, which always comes first, `parameters`,
    `weight_decay`, `grad_clip`, `name`, `lazy_mode`, and the arguments in
    `psfleet.optimizer.factory.BY_PARAMETER`, which treat parameters differently.

    Attributes:
        learning_rate: Default of the argument `learning_rate`, or None if the script must give it.
        arguments: Names of the positional arguments after `learning_rate`, in order, separated by spaces. If
            empty, these are the rule's fields and then "parameters weight_decay grad_clip name".
        older: Positional arguments from `parameters` on in older versions of the reference (Paddle),
            separated by spaces. Scripts written for these versions still work.
        ignored: Defaults of arguments that have no effect. They are accepted for scripts of the reference.
        lazy: True if rows of a sparse parameter are never updated in steps without a gradient for them.
        fields: Field of the rule for each argument that is named differently from its field.
        required: Names of the arguments without a default, separated by spaces.
        decay: Name of the field that the optimizer sets to 0 for parameters whose weights must not decay, or
            empty if there is none.
        options: Annotation and default of each argument that is not a field.
        rules: Function that makes the optimizer's rules from the rule's class, its fields, the first learning
            rate, `lazy_mode` and the options. With None, the optimizer has a single rule with these fields.
        doc: Docstring of the optimizer, or empty to use the docstring of the rule.
    """

    learning_rate: float | None = 0.001
    arguments: str = ""
    older: str = "regularization name"
    ignored: Mapping[str, float] = field(default_factory=dict)
    lazy: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    required: str = ""
    decay: str = ""
    options: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    rules: Callable[..., OptimizerRules] | None = None
    doc: str = ""


@dataclass(frozen=True)
class TorchSpec:
    """Optimizer of torch that computes the same as a rule, so that servers can run it for a torch script.

    Attributes:
        optimizer: Name of the class in torch.optim.
        options: torch's option for each field of the rule, in the order of the fields, separated by spaces;
            `betas.0` is the first of the betas. Without `weight_decay` among these, torch's `weight_decay` is
            an L2 decay.
        state: torch's names of the rule's slots (state values), in the order of the slots, separated by
            spaces.
        when: Options and values that choose this rule, if several rules belong to the optimizer.
        required: Options and values without which torch would compute something else.
        hint: Advice for each required option, shown if the script gives the option another value.
        dense: True if the optimizer updates dense parameters.
        rows: True if the optimizer accepts sparse gradients.
        every_row: True if a sparse gradient also updates the rows that it does not name.
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


@dataclass(frozen=True, slots=True)
class Slot:
    """State value that a rule keeps for each weight, such as a momentum.

    Attributes:
        name: Name of the slot in state dicts.
        initial: Value of the slot before the first update.
        per_unit: True for one value for the whole unit (Rule.unit) instead of one value for each weight.
        smallest: Smallest format in which rows of a sparse table may store the slot, if the table asks for a
            small format. Values are then rounded at random, so that they are right on average. Small values
            may become 0, in int8 those below about 1/127 of the row's largest value, in bfloat16 only those
            below 2^-133. So a slot that the rule divides by must not be int8, and a count must be float32.
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
    """Arithmetic of an optimizer for one weight, independent of tables, threads and messages.

    A complete rule::

        def sgd(w, g, h):
            return (w - h[0] * g,)

        @dataclass(frozen=True)
        class MySGD(Rule):
            name = "my_sgd"

            def scalar(self):
                return sgd

            def scalars(self, learning_rate, step):
                return (learning_rate,)

    A subclass is a frozen dataclass whose fields are the hyperparameters (NamedDefinition). The learning rate
    is not a field, because it comes with each push.

    `scalar()` returns a module-level function `rule(w, g, *slots, h) -> (w, *slots)`. Its source is inlined
    into the generated kernels, so it may name only its arguments and `math`. `h` is the tuple made by
    `scalars()`, all float32. The function takes its numbers from h, because a literal would widen the
    arithmetic to float64.

    A rule that needs sums over several weights, such as a norm, sets `unit` and adds two functions of the
    same kind:

        measure(w, g, *slots, h) -> (float, ...)    values of one weight that are summed over the unit
        combine(*sums, count, h) -> (float, ...)    values that are appended to h, from the sums and the
                                                    number of weights, before the scalar function runs

    `measure` gets the slots as they are before the update. If the sums need the updated slots, as Lamb's do,
    the rule also has

        advance(w, g, *slots, h) -> slots           the update of the slots, which runs first
        direction(w, *slots, h) -> (u,)             the direction u of the update, from the updated slots

    u then replaces g, and the remaining functions have no slots: `measure(w, u, h)`, `rule(w, u, h) -> (w,)`.
    All slots of such a rule have a value for each weight.

    Attributes:
        unit: Weights that are updated together and share sums and `per_unit` slots. "element": each weight by
            itself. "row": a row of a sparse table, or a slice of a dense array along its first axis.
            "parameter": the whole dense array, but a row of a sparse table, whose rows are on many servers.
        optimizer: Constructor of the rule's optimizer, or None if scripts cannot construct it.
        torch: Optimizers of torch that compute the same.
        counts: True if pushes are counts, each of which must be applied in full. Servers then neither average
            the pushes of a round nor correct, round or shrink them, and geo mode applies the rule too.
    """

    word: ClassVar[str] = "rule"
    known: ClassVar[dict[str, Any]] = RULES
    unit: ClassVar[str] = "element"
    optimizer: ClassVar[OptimizerSpec | None] = None
    torch: ClassVar[tuple[TorchSpec, ...]] = ()
    counts: ClassVar[bool] = False

    @property
    def slots(self) -> tuple[Slot, ...]:
        """State slots, in the order in which the scalar function takes and returns them."""
        return ()

    @property
    def turns(self) -> int:
        """Number of slots (state values) at the end of `slots` that take turns, or 0 if no slots take turns.

        In each step the scalar function gets only one of these slots, number (step - 1) % turns.
        """
        return 0

    def scalar(self) -> Callable[..., tuple[float, ...]]:
        """Return the scalar function for these hyperparameters."""
        raise NotImplementedError

    def measure(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function whose results are summed over the weights of a unit, or None without sums."""
        return None

    def advance(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function that updates the slots (state values) before `measure`.

        None if `scalar` updates them.
        """
        return None

    def direction(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function that computes the direction u of the update, or None without `advance`."""
        return None

    def combine(self) -> Callable[..., tuple[float, ...]] | None:
        """Return the function that turns the sums of `measure` into further numbers for the scalar function.

        None if there is no `measure`.
        """
        return None

    def scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        """Compute h, the numbers that are the same for a whole batch, in double precision.

        Args:
            learning_rate: Learning rate of this push, already scaled for the parameter.
            step: Number of updates that the table has had, including this one; the first update is 1.
        """
        raise NotImplementedError

    def resting_scalars(self, learning_rate: float, step: int) -> tuple[float, ...]:
        """Return h, the numbers of a batch, for rows without a gradient in a table that updates all rows."""
        return self.scalars(learning_rate, step)


def functions_of(rule: "Rule") -> Iterator[Callable[..., tuple[float, ...]]]:
    """Yield the functions of a rule that go into its kernels."""
    functions = (rule.scalar(), rule.advance(), rule.direction(), rule.measure(), rule.combine())
    yield from (function for function in functions if function is not None)


def check_functions(rule: "Rule") -> None:
    """Refuse a rule with functions that cannot be compiled into kernels.

    Raises:
        RuleError: A function uses a name, a number or a statement that kernels do not support, or the rule
            has `advance` without what belongs to it.
    """
    if rule.advance() is not None:
        # Kernels call `advance` where they compute the terms of the sums, once for each weight, and store all
        # slots there. A slot that the unit shares would keep its first value.
        if rule.measure() is None or rule.combine() is None or rule.direction() is None:
            raise RuleError(
                f"rule {rule.name!r} has `advance`; give it `direction`, `measure` and `combine` too"
            )
        for slot in rule.slots:
            if slot.per_unit:
                raise RuleError(
                    f"rule {rule.name!r} has `advance` and the slot {slot.name!r} with per_unit=True; give "
                    "the slot a value for each weight"
                )
    for function in functions_of(rule):
        why = fault_of(function)
        if why:
            raise RuleError(f"rule {rule.name!r}: the function {function.__name__} {why}")


@cache
def fault_of(function: Callable[..., Any], numbers: bool = False) -> str:
    """Return the reason why a function cannot go into kernels, or an empty string if it can.

    Args:
        function: Function of a rule or a policy.
        numbers: True to accept numbers in the function. Policies compute in float64, so numbers do no harm
            there.
    """
    name = function.__name__
    if not inspect.isfunction(function) or function.__qualname__ != name or name == "<lambda>":
        return "must be defined by def at the top of its module"
    if _KERNELS_OWN.fullmatch(name):
        return "has a name that the kernels use themselves; give it another"
    try:
        tree = tree_of(function)
    except (OSError, SyntaxError, ValueError) as error:
        return f"has no source that can be read ({error}); put it into a module that is a file"
    if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
        return "must be defined by a plain def, without decorators"
    names = {argument.arg for argument in tree.args.args} | {"math", *_BUILT_IN}
    names |= {
        n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    for node in _body(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            return f"uses {node.id!r}; it may use its arguments, {', '.join(_BUILT_IN)} and math"
        if isinstance(node, ast.Attribute) and not (_is_math(node) and node.attr in _MATH):
            choices = ", ".join(f"math.{name}" for name in _MATH)
            return f"uses {ast.unparse(node)!r}; of math it may use {choices}"
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not numbers:
            return (
                f"has the number {node.value!r}, which would widen its arithmetic to 64 bits; return "
                "it from `scalars` and take it from h"
            )
    return ""


def tree_of(function: Callable[..., Any]) -> ast.stmt:
    """Return the syntax tree of the definition of a function.

    Raises:
        OSError: The function's source cannot be read.
        SyntaxError: The source is no complete statement.
        ValueError: The source is more than one statement.
    """
    # One thread at a time: two that parse at once can get a SystemError (CPython issue 106905).
    with _parsing:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    return tree


def _body(tree: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the syntax nodes of the function's body, except the indices of subscripts such as h[0]."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        yield node
        inner = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
        pending.extend(inner)


def _is_math(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "math"
