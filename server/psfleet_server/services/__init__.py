"""Methods that a server offers: request bytes in, checked and handed to the server's parts, reply bytes out.

Start with `method_handlers`, which lists them. `shard_service` has pushes and pulls.
"""
