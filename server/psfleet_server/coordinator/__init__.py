"""State machine on server 0 that decides for the whole fleet: members, collectives and data.

Start with `coordinator`, which combines `membership` (who is in the fleet), `barriers` (collectives and mode
switches) and `data_dispatch` (which worker trains on which samples). All of them are pure: no I/O, no clock,
no threads. `psfleet_server.engine` makes the calls that they decide.
"""
