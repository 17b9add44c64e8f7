"""Which memory a table gets: the one that its definition names, or what the server's setting says."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from psfleet.errors import ConfigError
from psfleet.schema.table import Device, TableSpec
from psfleet.settings.declared_settings import JobSettings
from psfleet.tables.cuda_memory import CudaMemory
from psfleet.tables.host_memory import HostMemory
from psfleet.tables.memory_kind import MemoryKind

__all__ = ["HOST", "KINDS", "MemoryChoice"]

HOST = HostMemory()
KINDS: dict[str, MemoryKind] = {kind.name: kind for kind in (HOST, CudaMemory())}
"""The kinds of memory by name, in the order in which the setting auto looks for one that is not the host's.

Code asks them for what they are and does not compare their names.
"""

_AUTO = "auto"


@dataclass
class MemoryChoice:
    """What a process that holds tables chooses for each.

    Attributes:
        default: For tables that name no device.
        has_devices: Whether this process may use one: only servers and whoever trains embedded.
        limits: By kind the bytes that tables may take of it; 0 or none: what the kind says.
        is_auto: Tables that name no device are in host memory where the default one has no room for them.
    """

    default: Device = HOST.name
    has_devices: bool = False
    limits: Mapping[str, int] = field(default_factory=dict)
    is_auto: bool = False

    @classmethod
    def of_settings(cls, settings: JobSettings) -> "MemoryChoice":
        """What the setting `device`, and those of each memory's size, say.

        Raises:
            ConfigError: It names a device that is not here.
        """
        kinds = KINDS.values()
        limits: dict[str, int] = {
            kind.name: getattr(settings, kind.setting) for kind in kinds if kind.setting
        }
        if settings.device == _AUTO:
            there = (kind for kind in kinds if not kind.is_host and not kind.why_missing())
            return cls(next(there, HOST).name, True, limits, is_auto=True)
        kind = KINDS[settings.device]
        if why := kind.why_missing():
            raise ConfigError(
                f"PSFLEET_DEVICE is {kind.name!r}, but {why}. Say auto or cpu to hold tables in host memory"
            )
        return cls(kind.name, True, limits)

    def limit(self, kind: MemoryKind) -> int | None:
        """Bytes of this memory that tables may take in all, before there is any; None: no limit."""
        return kind.limit(self.limits.get(kind.name, 0))

    def of(self, spec: TableSpec, may_refuse: bool = True) -> MemoryKind:
        """Where the table is to be.

        Args:
            may_refuse: It is made now. Else it was made before, perhaps by a process with another device.

        Raises:
            ConfigError: Its definition names a device that this process lacks.
        """
        kind = KINDS[spec.device or self.default]
        why = kind.why_not(spec)
        if spec.device is not None and not why:
            why = self._why_missing(kind)
        if why and spec.device is not None and may_refuse:
            raise ConfigError(
                f"table {spec.name!r} asks for device={kind.name!r}, but {why}; use device='cpu'"
            )
        return HOST if why else kind

    def may_be_moved(self, spec: TableSpec, may_refuse: bool = True) -> bool:
        """Whether a table for which a device has no room is in host memory instead. Arguments as for `of`."""
        return not may_refuse or (spec.device is None and self.is_auto)

    def _why_missing(self, kind: MemoryKind) -> str:
        if self.has_devices or kind.is_host:
            return kind.why_missing()
        return "this process keeps tables in host memory"
