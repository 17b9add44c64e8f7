"""Run in a process of its own with the driver of driver.c: what the driver is given for each launch.

Dense and sparse tables of a rule of each shape do what they do in tests/tables, with kernels that run from
the parameters of their launches, and have the bits of host memory. For each launch numba's dispatcher gives
the driver the same bytes. At the end each kernel of tables has been launched.
"""

import sys

from tests.kernels import driven_kernels

driven_kernels.install()

from psfleet.core.engine.kernels.device.cuda import table_kernels  # noqa: E402
from tests.kernels.rule_cases import IS_FULL, RULE_CASES, SHAPES  # noqa: E402
from tests.tables import compiled_kernels, device_distinct, device_rows, device_tables  # noqa: E402


def table_operations() -> set[str]:
    """The names of the kernels of tables, which no rule has a part in."""
    return {
        kernel.py_func.__name__
        for name in ("cuda_index", "cuda_rows", "cuda_distinct")
        for kernel in vars(table_kernels(name)).values()
        if not getattr(kernel, "targetoptions", {"device": True}).get("device")
    }


def main() -> int:
    """Compare what is launched."""
    operations = driven_kernels.ComparedOperations()
    compiled_kernels.use(operations)
    wrong = []
    for rule in RULE_CASES:
        if (IS_FULL or type(rule) in SHAPES) and not device_tables.same(rule):
            wrong.append(f"dense {rule}")
    shaped = {type(rule) for rule in RULE_CASES} if IS_FULL else set(SHAPES)
    for number, spec in enumerate(device_rows.SPECS):
        if type(spec.rule) in shaped or spec.entry or spec.precision != "float32":
            for seed in range(2):
                wrong.append(device_rows.differ(number, seed, None))
    checks = (device_rows.grow, device_rows.rebuild_in_place, device_distinct.is_right)
    wrong += [check.__name__ for check in checks if not check()]
    wrong = [*filter(None, wrong)]
    missing = table_operations() - driven_kernels.names
    print(
        f"{operations.count} launches as numba's, kernels never launched: {missing}, wrong: {wrong}"
    )
    return bool(wrong or missing or not operations.count)


if __name__ == "__main__":
    sys.exit(main())
