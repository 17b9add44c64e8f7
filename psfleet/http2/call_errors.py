"""How calls and connections fail."""

__all__ = ["CallFailed", "ConnectionBroken", "DeadlinePassed"]


class ConnectionBroken(Exception):
    """The connection is lost, or the other end does not keep to the protocol."""


class DeadlinePassed(Exception):
    """The call was not answered in time."""


class CallFailed(Exception):
    """The other end has answered with a status.

    Attributes:
        code: Of gRPC, as a number.
        details: For a person.
        metadata: Trailing headers, lower case.
    """

    def __init__(self, code: int, details: str, metadata: dict[str, str]) -> None:
        super().__init__(f"status {code}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata
