"""Internal packages of psfleet, which scripts do not import. The project calls each package a *room*.

From the lowest to the highest: `base` (errors, settings, files, threads, logs), `engine` (the parameter
server without I/O), `net` (messages and the connections they are sent on), `runtime` (the object through
which a script reaches its tables), `graph` (programs and pipelines), `client` (`psfleet.connect`). The
public packages, such as psfleet.optimizer, lie between and above them; CONTRIBUTING.md has a picture.
"""
