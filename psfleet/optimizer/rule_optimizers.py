"""The optimizers that psfleet's rules declare, made by psfleet.optimizer.factory.

`rule_optimizers.pyi` tells type checkers what is here; tools/generate_stubs.py writes it.
"""

from psfleet.core.engine.rules import own_rules
from psfleet.optimizer.factory import optimizer_of

_CLASSES = [optimizer_of(rule) for rule in own_rules() if rule.optimizer]
for _class in _CLASSES:
    _class.__module__ = __name__
    globals()[_class.__name__] = globals()[f"{_class.__name__}Optimizer"] = _class

__all__ = [f"{kind.__name__}{older}" for kind in _CLASSES for older in ("", "Optimizer")]
