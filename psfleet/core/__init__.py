"""The inside of psfleet: six rooms that scripts do not import.

From the ground up: `base` (errors, settings, files, threads, logs), `engine` (the parameter server without
I/O), `net` (what travels, and the connections it travels on), `runtime` (how a script reaches its tables),
`graph` (programs and pipelines), `client` (`psfleet.connect`). The public packages beside it stand
between and above them; CONTRIBUTING.md shows all of them in one picture.
"""
