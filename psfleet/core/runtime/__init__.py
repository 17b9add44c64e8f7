"""The runtime interface: what a trainer script asks of a fleet, and what is checked before it leaves."""
