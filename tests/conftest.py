"""How hypothesis works in all tests: by number of examples, never by time.

A machine that does other things meanwhile is no fault of what is tested.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("by number", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by number")
