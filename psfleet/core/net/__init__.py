"""Messages between processes, and the connections they are sent on.

`frame.py` defines the message of a push or a pull: a protobuf header with raw bytes behind it.
`segments.py` lays out ids, gradients and values in these bytes. `v1/` is generated from `protos/`. `http2/`
has the client and server for calls with tensors, `shared_memory.py` passes tensors between processes of one
host, and `connections/` has TLS, tokens and gRPC channels. `body.py` encodes records of logs, snapshots and
replication. `message_codec.py` encodes messages that only psfleet reads.

Start with `frame.py`, then `segments.py`.

Uses core.base, core.engine.
"""
