"""Common parts of engines whose processes run on other machines, each under an agent.

Start with `remote_engine.py`, the base class, then `agent_messages.py`, the protocol with agents.
"""
