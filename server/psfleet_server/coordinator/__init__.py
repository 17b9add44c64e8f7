"""State machine on server 0 that decides for the whole fleet: members, collectives and data.

Start with `coordinator`, which combines `membership` (who is in the fleet), `worker_liveness` (who is
dead), `barriers` (collectives and mode switches) and `data_dispatch` (distribution of samples). The whole
package is pure: no I/O, no clock, no threads. `psfleet_server.engine` makes the calls that the coordinator
decides.
"""
