"""For tests and notebooks: real servers on this machine, workloads, and the conformance test of rules."""

from psfleet.fleet.testing.local_fleet import LocalFleet as LocalFleet
from psfleet.fleet.testing.rule_conformance import check_rule as check_rule
