"""The launcher's side of takeovers: which process has which part at a server's place."""


class Place:
    """One server's address and the processes that may answer there.

    Attributes:
        names: Of the processes.
        primary, standby: Names; no standby: empty.
        deposed: A primary that lives although its standby has taken over, which it has not heard.
        orphan: A standby that lives although its primary was released from it; it ends with that one.
        moved: Workers that have heard of the primary since it took over.
        attach: Number of the last standby.
    """

    def __init__(self, address: str, has_standbys: bool) -> None:
        self.address = address
        self.names = [f"{address}.0", f"{address}.1"] if has_standbys else [f"{address}.0"]
        self.primary = self.names[0]
        self.standby = self.deposed = self.orphan = ""
        self.moved: set[str] = set()
        self.attach = 0

    def follows(self, name: str) -> None:
        """A new process is the standby."""
        self.standby = name
        self.attach += 1

    def take_over(self, incarnations: bool) -> None:
        """The standby is the primary now; whether the one before lives."""
        self.deposed = self.primary if incarnations else ""
        self.primary, self.standby = self.standby, ""
        self.moved = set()
