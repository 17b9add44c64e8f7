"""Common parts of engines for several machines. On each machine an agent runs the processes.

Read `remote_engine.py`, the base class, first, then `agent_messages.py`, the protocol with agents.
"""
