"""The consistency modes: each is one small file that declares what it does.

A new mode is a new file, which is found; the names below are those that others import.
"""

import importlib
import pkgutil

from psfleet.consistency.built_in_modes import AsyncMode as AsyncMode
from psfleet.consistency.built_in_modes import GeoMode as GeoMode
from psfleet.consistency.built_in_modes import HalfAsyncMode as HalfAsyncMode
from psfleet.consistency.built_in_modes import LatePushMode as LatePushMode
from psfleet.consistency.built_in_modes import SspMode as SspMode
from psfleet.consistency.built_in_modes import SyncMode as SyncMode
from psfleet.consistency.consistency_mode import MODES as MODES
from psfleet.consistency.consistency_mode import NO_MODE as NO_MODE
from psfleet.consistency.consistency_mode import ConsistencyMode as ConsistencyMode
from psfleet.consistency.consistency_mode import ModeGuide as ModeGuide
from psfleet.consistency.consistency_mode import at_least_0 as at_least_0
from psfleet.consistency.consistency_mode import at_least_1 as at_least_1
from psfleet.consistency.consistency_mode import find_mode as find_mode
from psfleet.consistency.consistency_mode import find_part as find_part
from psfleet.consistency.consistency_mode import listed as listed
from psfleet.consistency.consistency_mode import register as register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
