"""Statistics of the fleet, summed over the servers."""

from typing import Any

from psfleet.runtime.process_runtime import active


def print_table_stat(table: str | None) -> None:
    """See Fleet.print_table_stat."""
    for name, entry in table_stat().items():
        if table in (None, name):
            print(
                f"table {name}: {entry['count']:,} {entry['unit']} on {entry['servers']} server(s), "
                f"{entry['bytes'] / 2**20:,.1f} MiB, {entry['step']:,} updates",
                flush=True,
            )


def table_stat() -> dict[str, dict[str, Any]]:
    """See Fleet.table_stat."""
    totals: dict[str, dict[str, Any]] = {}
    active().flush()
    for server in active().stats():
        for table in server["tables"]:
            unit = "rows" if table["kind"] == "sparse" else "values"
            entry = totals.setdefault(
                table["name"], {"count": 0, "bytes": 0, "step": 0, "servers": 0, "unit": unit}
            )
            entry["count"] += table["count"]
            entry["bytes"] += table["bytes"]
            entry["step"] = max(entry["step"], table["step"])
            entry["servers"] += 1
    return totals


def staleness() -> dict[int, int]:
    """See Fleet.staleness."""
    total: dict[int, int] = {}
    for server in active().stats():
        for age, count in server.get("staleness", {}).items():
            total[age] = total.get(age, 0) + count
    return dict(sorted(total.items()))
