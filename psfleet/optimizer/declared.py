"""The optimizers that rules declare, made by psfleet.optimizer.factory.

`declared.pyi` tells type checkers what is here; tools/generate_stubs.py writes it.
"""

from psfleet import rules
from psfleet.optimizer.factory import optimizer_of

_CLASSES = [
    optimizer_of(rule)
    for rule in vars(rules).values()
    if isinstance(rule, type) and issubclass(rule, rules.Rule) and rule.optimizer
]
for _class in _CLASSES:
    _class.__module__ = __name__
    globals()[_class.__name__] = globals()[f"{_class.__name__}Optimizer"] = _class

__all__ = [f"{made.__name__}{older}" for made in _CLASSES for older in ("", "Optimizer")]
