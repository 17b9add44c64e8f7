"""Whether kernels launched on a device have the host's bits: the first check on a GPU, in about a minute.

python -m tests.kernels.cuda_quick

A rule of each shape updates dense arrays and rows, tables of a few kinds run short programs beside tables in
host memory, and ids are made distinct. The other programs of `make test-gpu` try every rule and kind.
"""
# mypy: disable-error-code="no-untyped-call,attr-defined"

import sys
import time
from collections.abc import Callable
from functools import partial

from numba import cuda

from psfleet.core.engine.kernels.device.cuda_arithmetic import SIMULATED
from psfleet.core.engine.rules import Adam
from psfleet.core.engine.schema.table import DecaySpec
from tests.kernels import cuda_agreement
from tests.kernels.rule_cases import SHAPES
from tests.tables import device_distinct, device_rows


def programs() -> list[int]:
    """The numbers of some kinds of tables: plain, with an entry, that update every row, and in 16 bits."""
    kinds = [
        (type(spec.rule) is Adam, spec.entry is None, spec.every_row, spec.precision)
        for spec in device_rows.SPECS
    ]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds) if kind[0]]


def is_like_host(number: int) -> bool:
    """Whether a program on a table of this number ends with the bits of host memory."""
    return not device_rows.differ(number, 1, None)


def main() -> int:
    """Print a line for each check, and what is wrong."""
    name = "numba's simulator" if SIMULATED else cuda.get_current_device().name
    print(f"kernels on {name}")
    checks: dict[str, Callable[[], bool]] = {
        f"{cls.__name__}, {'rows' if sparse else 'dense'}": partial(
            cuda_agreement.agrees, cls(), DecaySpec(0.1, 0.2), sparse
        )
        for cls in SHAPES
        for sparse in (False, True)
    }
    for number in programs():
        checks[f"table {number} of tests/tables/device_rows.py"] = partial(is_like_host, number)
    checks["distinct ids"] = device_distinct.is_right
    wrong = []
    for label, check in checks.items():
        start = time.perf_counter()
        verdict = "same bits" if check() else "WRONG"
        print(f"{verdict}: {label} ({time.perf_counter() - start:.1f} s)", flush=True)
        wrong += [label] * (verdict == "WRONG")
    print(f"{len(checks)} checks, wrong: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
