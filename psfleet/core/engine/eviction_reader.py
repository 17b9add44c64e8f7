"""EvictionReader: reads which rows a sparse table has evicted, to update a cache or an index elsewhere.

A script gets an EvictionReader from `fleet.evictions` or from a client's table. It works with every runtime.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.eviction_records import EvictedIds, joined
from psfleet.core.engine.runtime_interface import Runtime
from psfleet.core.engine.schema.table import TableSpec, key_of

_PAGE = 1 << 16  # evictions that one read takes from each server at most


class EvictionReader:
    """Reads which rows a sparse table has removed. Its definition must include an EvictionStreamEntry.

        reader = fleet.evictions("users")
        for gone in reader:  # ends at the last eviction so far; iterate again later for more
            cache.delete(gone.ids)

    Each eviction is read once. The servers store the last evictions only, as many as `keep` of the
    EvictionStreamEntry says. If the reader falls further behind, `EvictedIds.missed` is the number of lost
    evictions. With `fleet.remember("evictions", reader)` a restarted script continues where it was.

    Attributes:
        position: For each server, the number of the eviction to read next. () before the first read of a
            reader that begins with the oldest stored evictions.
    """

    def __init__(
        self, runtime: Runtime, table: str | TableSpec, position: Sequence[int] = ()
    ) -> None:
        self._runtime = runtime
        self._table = key_of(table) if isinstance(table, str) else table.key
        self.position = tuple(map(int, position))

    def read(self) -> EvictedIds:
        """Return the ids evicted since the last read, at most 65,536 of each server.

        Raises:
            UsageError: The table records no evictions, or the position was read from another number of
                servers, or is beyond the last eviction.
        """
        servers = max(self._runtime.server_num, 1)
        if self.position and len(self.position) != servers:
            raise UsageError(
                f"the position {self.position} of evictions is one of {len(self.position)} servers and the "
                f"fleet has {servers}, whose positions begin at 0 again; start without a position"
            )
        evictions = joined(
            self._runtime.evictions(self._table, self.position or (0,) * servers, _PAGE)
        )
        self.position = evictions.position
        return evictions

    def __iter__(self) -> Iterator[EvictedIds]:
        while len(evictions := self.read()) or evictions.missed:
            yield evictions

    def state_dict(self) -> dict[str, Any]:
        """Return the attribute `position` of the reader, which `fleet.remember` saves in snapshots."""
        return {"position": list(self.position)}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Continue reading at a position that `state_dict` has returned."""
        self.position = tuple(state["position"])
