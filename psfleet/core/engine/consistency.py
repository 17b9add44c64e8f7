"""Consistency modes: how to declare one, and psfleet's own (sync, async, ssp, geo, half-async).

A consistency mode decides when pushes take effect and which pulls have to wait. A mode is a small class that
declares its name, number, settings and properties. If a mode needs code of its own in servers or workers, it
names a class as text, `module:class`, so that this module needs to import neither. Servers, workers and tools
read the properties of a mode and never compare names, which is why a mode outside psfleet works like
psfleet's own (docs/modes.md).
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Self, TypeVar

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import check, setting
from psfleet.core.base.settings.kinds import one_of

_SSP_CLOCK = "psfleet.core.engine.shard.shard_state:SspClock"
_number = partial(setting, most=2**31 - 1)
at_least_0: Any = partial(_number, least=0, wanted="at least 0 and below 2^31")
"""Declares a field of a mode as a setting with whole numbers from 0 on.

The arguments are those of `setting`.
"""
at_least_1: Any = partial(_number, least=1, wanted="at least 1 and below 2^31")
"""Declares a field of a mode as a setting with whole numbers from 1 on.

The arguments are those of `setting`.
"""


_NAME = re.compile("[a-z][a-z0-9-]*")


@dataclass(frozen=True)
class ModeGuide:
    """Description of a mode: its row in the table of modes in docs/strategies.md.

    Attributes:
        push: Handling of a push.
        pull: Moment at which a pull is answered.
        promise: Guarantees of the mode.
        price: Disadvantages of the mode.
    """

    push: str = ""
    pull: str = ""
    promise: str = ""
    price: str = ""


@dataclass(frozen=True)
class ConsistencyMode:
    """Consistency mode: when pushes take effect, which pulls wait, and code that a worker runs for the mode.

    A mode is a derived class: a frozen dataclass under `@register`. Its fields are its settings, each with a
    default; its class attributes are the properties below. The first line of its docstring describes the mode
    in protos/psfleet/v1/shard.proto. docs/modes.md shows how to add a mode:

        @register
        @dataclass(frozen=True)
        class MyMode(ConsistencyMode):
            name, number, has_clocks = "mine", 1001, True
            staleness: int = at_least_0(4, "pushes a worker may be ahead of another")

    This class itself is the mode of a fleet that no worker has joined.

    Attributes:
        name: Name in strategies, flags and messages: lower-case letters, digits and hyphens.
        number: Number in messages and files. Numbers from 1000 on are for modes outside psfleet.
        has_rounds: True if servers wait for one push of every worker (a round) and then apply the mean of
            these pushes, and a pull waits for that. The samples of each round are planned, so that the same
            script gives bit-identical results. False if a push takes effect when it arrives; workers then
            lease samples.
        has_clocks: True if a pull waits while its worker is more than `staleness` pushes ahead of another.
            The mode then has the setting `staleness`, and its rule for waiting pulls is SspClock of
            psfleet.core.engine.shard.shard_state.
        gate: `module:class` of another rule for waiting pulls, derived from PullGate of
            psfleet.core.engine.shard.shard_state. Empty if pulls wait only for rounds or clocks, or not at
            all.
        server_settings: Names of the settings that servers need to know. Their values are whole numbers, and
            must be the same in all workers.
        adds_deltas: True if a push has deltas to add to the weights, and each worker has its own optimizer
            state. False if a push has gradients for the table's optimizer rule.
        merges_pushes: True if a push may contain the gradients of several steps and be sent after these
            steps.
        runtime: `module:class` of a runtime that wraps the worker's connection to the servers. The class
            takes a Runtime and the ConsistencySettings, and has a method `release`. Empty if there is none.
        conflicts: Reasons why parts of a strategy cannot be on in this mode, by the name of the part.
        main_setting: Setting that the number in `psfleet mode JOB ssp:4` sets, or empty if the mode takes no
            number.
        a_sync: For each name in Paddle's `a_sync_configs`, the setting that it sets. The first name selects
            the mode.
        a_sync_off: Values of the first name that do not select the mode; the first value is its default.
        guide: Row of the table of modes in docs/strategies.md.
    """

    name: ClassVar[str] = ""
    number: ClassVar[int] = 0
    has_rounds: ClassVar[bool] = False
    has_clocks: ClassVar[bool] = False
    gate: ClassVar[str] = ""
    server_settings: ClassVar[tuple[str, ...]] = ()
    adds_deltas: ClassVar[bool] = False
    merges_pushes: ClassVar[bool] = False
    runtime: ClassVar[str] = ""
    conflicts: ClassVar[Mapping[str, str]] = {}
    main_setting: ClassVar[str] = ""
    a_sync: ClassVar[Mapping[str, str]] = {}
    a_sync_off: ClassVar[tuple[int, ...]] = ()
    guide: ClassVar[ModeGuide] = ModeGuide()

    def __post_init__(self) -> None:
        check(self, lambda mode: f"consistency {mode.name}")

    @cached_property
    def pulls_wait(self) -> bool:
        """True if a pull may wait for other workers.

        A worker that waits at a barrier or another collective must then tell the servers, so that pulls do
        not wait for it.
        """
        return self.has_rounds or bool(self.pull_gate)

    @cached_property
    def pull_gate(self) -> str:
        """Rule for waiting pulls as `module:class`: `gate`, or SspClock if the mode has clocks, or empty."""
        return self.gate or (_SSP_CLOCK if self.has_clocks else "")

    @cached_property
    def agreed_settings(self) -> dict[str, int]:
        """Values of the settings that servers need to know, in the order in which messages contain them."""
        clocks = ("staleness",) if self.has_clocks else ()
        names = dict.fromkeys((*clocks, *self.server_settings))
        return {name: getattr(self, name) for name in names}

    def agreed(self, *values: int) -> Self:
        """Return the mode as servers know it, with defaults for the settings that servers do not know.

        Args:
            values: New values for the settings that servers know, in the order of `agreed_settings`. A
                setting without a new value keeps its value.
        """
        settings = self.agreed_settings
        return type(self)(**(settings | dict(zip(settings, values, strict=False))))

    @cached_property
    def reads_ahead(self) -> bool:
        """True if a pull for the next step may be sent before this worker's push."""
        return not self.pulls_wait and not self.runtime


MODES: dict[str, ConsistencyMode] = {}
"""Every known mode with its default settings, by name, ordered by number."""

NO_MODE = ConsistencyMode()
"""Mode of a fleet that no worker has joined."""

M = TypeVar("M", bound=ConsistencyMode)


def register(mode: type[M]) -> type[M]:
    """Add a mode to MODES. Use it as a class decorator, above `@dataclass`.

    If a class of the same module and name was registered before, the new class replaces it.

    Raises:
        ConfigError: The name or number is not valid, or another mode has it.
    """
    if not _NAME.fullmatch(mode.name) or not 0 < mode.number < 2**31:
        raise ConfigError(
            f"the mode {mode.__name__} has the name {mode.name!r} and the number {mode.number}; a name has "
            "lower-case letters, digits and hyphens, and a number is at least 1 and below 2^31"
        )
    instance = mode()
    for name, value in instance.agreed_settings.items():
        if type(value) is not int:
            raise ConfigError(
                f"servers know the setting {name!r} of the mode {_place(mode)}, whose default is {value!r}; "
                "what they know are whole numbers"
            )
    for known in MODES.values():
        same = {known.name, known.number} & {mode.name, mode.number}
        if same and _place(type(known)) != _place(mode):
            raise ConfigError(
                f"the mode {_place(mode)} has the name {mode.name!r} and the number {mode.number}, but "
                f"{known.name!r} is {_place(type(known))} with the number {known.number}; give it others"
            )
    # Rebuild the dictionary in the order of numbers, because modes may be defined in any order.
    modes: list[ConsistencyMode] = [*_others(mode), instance]
    modes.sort(key=lambda instance: instance.number)
    MODES.clear()
    MODES.update({instance.name: instance for instance in modes})
    return mode


def _others(mode: type[ConsistencyMode]) -> list[ConsistencyMode]:
    return [known for known in MODES.values() if _place(type(known)) != _place(mode)]


def find_mode(name: str | None) -> ConsistencyMode:
    """Return the mode of this name with its default settings, or NO_MODE for None or an empty name.

    Raises:
        ConfigError: No mode has this name.
    """
    if not name:
        return NO_MODE
    if name not in MODES:
        raise ConfigError(
            f"mode is {name!r}; it must be {listed()}. For a mode of your own, import its module in the "
            "script, which names the mode, and pass the module to psfleet-launch --rules or PSFLEET_RULES"
        )
    return MODES[name]


def find_part(place: str) -> Any:
    """Import and return the object that a mode declares as `module:class`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def listed() -> str:
    """Return the names of all modes in words, for messages."""
    return one_of(*MODES).wanted


def _place(mode: type[ConsistencyMode]) -> str:
    return f"{mode.__module__}.{mode.__qualname__}"


@register
@dataclass(frozen=True)
class AsyncMode(ConsistencyMode):
    """Each push is applied when it arrives."""

    name = "async"
    number = 2
    guide = ModeGuide(
        "is applied when it arrives",
        "at once",
        "each push counts once; a worker sees its own pushes",
        "workers may drift apart without a limit; results differ from run to run",
    )


@register
@dataclass(frozen=True)
class SyncMode(ConsistencyMode):
    """Bulk synchronous rounds: one push of every worker, averaged in worker order."""

    name = "sync"
    number = 1
    has_rounds = True
    guide = ModeGuide(
        "waits until every worker has pushed; the mean of these pushes is one update",
        "after this update",
        "the same bits for any number of servers, any order of messages, and after faults",
        "every worker waits for the slowest",
    )


@register
@dataclass(frozen=True)
class SspMode(ConsistencyMode):
    """Async, but a pull waits while its worker is too far ahead of another."""

    staleness: int = at_least_0(
        2, "pushes that a worker may be ahead of the slowest", names="--staleness"
    )
    name = "ssp"
    number = 3
    has_clocks = True
    main_setting = "staleness"
    a_sync: ClassVar = {"staleness": "staleness"}
    guide = ModeGuide(
        "is applied when it arrives",
        "as soon as this worker is at most `staleness` pushes ahead of the slowest",
        "as async; no pull is answered while its worker is further ahead",
        "fast workers wait; results differ from run to run",
    )


@register
@dataclass(frozen=True)
class GeoMode(ConsistencyMode):
    """Async, but a push brings what is to be added to the weights."""

    k_steps: int = at_least_1(10, "steps between two exchanges", names="--k-steps")
    copied_rows: int = at_least_1(
        1 << 20, "rows of a sparse table that a worker keeps copies of, at most"
    )
    name = "geo"
    number = 4
    adds_deltas = True
    runtime = "psfleet.core.runtime.modes.geo:GeoRuntime"
    conflicts: ClassVar = {
        "dgc": "one sends the largest gradients of each step, the other none",
        "amp": "in geo mode gradients do not travel; leave amp out",
        "wire": "what travels in geo mode is added to the weights as it is; leave wire out",
        "pipeline": "stages have different parameters, and geo counts them as workers of one model",
    }
    main_setting = "k_steps"
    a_sync: ClassVar = {"k_steps": "k_steps"}
    a_sync_off = (0, -1)
    guide = ModeGuide(
        "updates the worker's own copies; every `k_steps`-th push sends their changes to the servers",
        "mostly from the copies, without a call",
        "every change is added once",
        "a worker that dies loses the changes that it has not sent; each worker has its own optimizer state",
    )


@register
@dataclass(frozen=True)
class HalfAsyncMode(ConsistencyMode):
    """Async, but workers merge gradients before they push."""

    max_merge: int = at_least_1(8, "gradients that are summed to one push, at most")
    queue_size: int = at_least_1(
        16, "gradients that may wait to be sent; with more, the worker waits"
    )
    name = "half-async"
    number = 5
    merges_pushes = True
    runtime = "psfleet.core.runtime.modes.half_async:HalfAsyncRuntime"
    main_setting = "max_merge"
    a_sync: ClassVar = {"max_merge_var_num": "max_merge", "send_queue_size": "queue_size"}
    a_sync_off = (1,)
    guide = ModeGuide(
        "waits in the worker's queue, which holds up to `queue_size`; a thread sums up to `max_merge` and "
        "sends the sum",
        "at once",
        "each gradient is sent once",
        "a worker may not see its own last gradients yet; results differ from run to run",
    )
