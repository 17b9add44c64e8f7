"""The operations by family, each with a forward and a vector-Jacobian product.

A new family is a new file, which is found.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
