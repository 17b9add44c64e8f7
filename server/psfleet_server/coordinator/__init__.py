"""The pure state of server 0: membership, barriers, data dispatch and mode requests."""
