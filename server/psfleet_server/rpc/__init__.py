"""Path of a call to a server: endpoints, limits, tokens, shared memory and replies."""
