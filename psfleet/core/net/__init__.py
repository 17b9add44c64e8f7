"""Messages between processes, and the connections they travel on.

`frame.py` is the layout of a push or a pull: a protobuf header and raw tensors behind it. `v1/` is
generated from `protos/`. `http2/` is the endpoint for tensors, `shared_memory.py` their way between
processes of one host, and `connections/` has TLS, tokens and gRPC channels. `body.py` is the container of
logs, snapshots and replication, and `message_codec.py` writes the messages that only psfleet reads.

Start with `frame.py`, then `segments.py`.

Uses core.base, core.engine.
"""
