"""gRPC methods of a server: check a request's bytes, call the part of the server that acts, encode the reply.

Start with `method_handlers`, which lists all methods. `shard_service` has pushes and pulls.
"""
