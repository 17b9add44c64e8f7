"""Hooks of a converted model: what happens when the model is loaded, saved or run.

The servers hold the values of a converted model, and the model has copies. So values that are out of date are
pulled before the model computes or is saved, and a state dict that the model loads is written to the servers.
"""

import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from psfleet.core.base.errors import UsageError
from psfleet.torch.table_weight import refuse_graph


class SharedByCopies:
    """Base class of objects that a copy of the model shares with the model, and that cannot be pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __getstate__(self) -> Any:
        raise UsageError(
            "a model or optimizer whose parameters are on the servers cannot be pickled; save "
            "model.state_dict() and opt.state_dict()"
        )


class ModelHooks(SharedByCopies):
    """Registers the hooks of a model, for its DistributedOptimizer.

    A copy of a model (`copy.deepcopy`) has the same hooks, but values of its own. Hooks do nothing for it.

    Args:
        model: The converted model.
        before_use: Called before the whole model computes (with True) or is saved (with False).
        after_load: Called with the model after it has loaded a state dict as a whole.

    Attributes:
        is_changed: True if a module of the model was loaded and the servers still have the old values.
    """

    def __init__(
        self,
        model: nn.Module,
        before_use: Callable[[bool], None],
        after_load: Callable[[nn.Module], None],
    ) -> None:
        self.is_changed = False
        self._model = weakref.ref(model)
        self._modules = weakref.WeakSet(model.modules())
        self._before_use, self._after_load = before_use, after_load
        model.register_load_state_dict_post_hook(self._on_load)  # type: ignore[no-untyped-call]
        for module in self._modules:
            module.register_load_state_dict_post_hook(self._on_module_load)  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._on_use)
        model.register_state_dict_pre_hook(self._on_use)  # type: ignore[no-untyped-call]
        model.__prepare_scriptable__ = refuse_graph  # type: ignore[assignment]

    def _on_use(self, module: nn.Module, *hook_arguments: Any) -> None:
        if self._model() is module:
            # A forward hook gets the arguments of forward(), a state_dict hook the prefix and a flag.
            self._before_use(len(hook_arguments) == 1)

    def _on_load(self, module: nn.Module, keys: Any) -> None:
        if self._model() is module:
            self._after_load(module)

    def _on_module_load(self, module: nn.Module, keys: Any) -> None:
        self.is_changed = self.is_changed or module in self._modules
