"""Path of a call to a server: endpoints, limits, tokens, shared memory and replies.

Start with `replies`, which explains how a call waits without a thread. `call_layout` and `attached_memory`
make small pushes and pulls fast.
"""
