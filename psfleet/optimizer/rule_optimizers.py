"""Optimizers such as Adam and SGD. psfleet.optimizer.factory makes each class from its update rule.

`rule_optimizers.pyi` declares them for type checkers; tools/generate_stubs.py writes that file.
"""

from psfleet.core.engine.rules import own_rules
from psfleet.optimizer.factory import optimizer_of

_CLASSES = [optimizer_of(rule) for rule in own_rules() if rule.optimizer]
for _class in _CLASSES:
    _class.__module__ = __name__
    globals()[_class.__name__] = globals()[f"{_class.__name__}Optimizer"] = _class

__all__ = [f"{kind.__name__}{older}" for kind in _CLASSES for older in ("", "Optimizer")]
