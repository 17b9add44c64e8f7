"""Operations by family: elementwise arithmetic, matrix products, reductions, losses, embeddings and more.

Each operation has a shape inference, a forward pass and a vector-Jacobian product (see `Op` in operation.py).
Importing this package imports all its modules, so that `find_op` knows every operation by name. A new file in
the package needs no entry anywhere.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
