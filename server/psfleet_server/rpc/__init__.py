"""How calls reach a server: endpoints, limits, tokens, shared memory and replies."""
