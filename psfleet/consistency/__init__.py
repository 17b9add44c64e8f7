"""The consistency modes: each is one small file that declares what it does.

A new mode is a new file, which is found; the names below are those that others import.
"""

import importlib
import pkgutil

from psfleet.consistency.async_mode import AsyncMode as AsyncMode
from psfleet.consistency.consistency_mode import ConsistencyMode as ConsistencyMode
from psfleet.consistency.consistency_mode import ModeGuide as ModeGuide
from psfleet.consistency.consistency_mode import at_least_0 as at_least_0
from psfleet.consistency.consistency_mode import at_least_1 as at_least_1
from psfleet.consistency.finding_modes import MODES as MODES
from psfleet.consistency.finding_modes import NO_MODE as NO_MODE
from psfleet.consistency.finding_modes import find_mode as find_mode
from psfleet.consistency.finding_modes import find_part as find_part
from psfleet.consistency.finding_modes import listed as listed
from psfleet.consistency.finding_modes import register as register
from psfleet.consistency.geo_mode import GeoMode as GeoMode
from psfleet.consistency.half_async_mode import HalfAsyncMode as HalfAsyncMode
from psfleet.consistency.late_pushes import LatePushMode as LatePushMode
from psfleet.consistency.ssp_mode import SspMode as SspMode
from psfleet.consistency.sync_mode import SyncMode as SyncMode

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
