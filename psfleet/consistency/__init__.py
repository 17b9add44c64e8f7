"""The consistency modes: each is one small file that declares what it does.

A new mode is a new file, which is found; the names below are those that others import.
"""

import importlib
import pkgutil

from psfleet.consistency.modes import MODES as MODES
from psfleet.consistency.modes import NO_MODE as NO_MODE
from psfleet.consistency.modes import AsyncMode as AsyncMode
from psfleet.consistency.modes import ConsistencyMode as ConsistencyMode
from psfleet.consistency.modes import GeoMode as GeoMode
from psfleet.consistency.modes import HalfAsyncMode as HalfAsyncMode
from psfleet.consistency.modes import LatePushMode as LatePushMode
from psfleet.consistency.modes import ModeGuide as ModeGuide
from psfleet.consistency.modes import SspMode as SspMode
from psfleet.consistency.modes import SyncMode as SyncMode
from psfleet.consistency.modes import at_least_0 as at_least_0
from psfleet.consistency.modes import at_least_1 as at_least_1
from psfleet.consistency.modes import find_mode as find_mode
from psfleet.consistency.modes import find_part as find_part
from psfleet.consistency.modes import listed as listed
from psfleet.consistency.modes import register as register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
