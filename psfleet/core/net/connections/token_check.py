"""Checks the token of each call: that of the job, or that of readers for calls that only read.

Servers, agents and the prediction service all ask here. credentials.py reads the tokens, each file once.
Tokens are compared in constant time, so the time of a refusal does not tell how many characters of a guess
are right.
"""

import hmac
from collections.abc import Sequence

from psfleet.core.net.connections.credentials import Credentials


def is_permitted(credentials: Credentials, authorization: str | bytes, *, only_reads: bool) -> bool:
    """Return whether a call with this `authorization` header is permitted.

    Args:
        credentials: The job's certificates and token, as its servers have them.
        authorization: The header.
        only_reads: True if the call changes nothing, so that the token of readers is permitted too.
    """
    header = (
        authorization.encode("utf-8", "replace")
        if isinstance(authorization, str)
        else authorization
    )
    known = [credentials.bearer, credentials.reader_bearer][: 2 if only_reads else 1]
    return any(hmac.compare_digest(header, bearer.encode()) for bearer in known)


def refusal(
    credentials: Credentials, authorizations: Sequence[str | bytes], *, only_reads: bool
) -> str:
    """Return the reason to refuse a call with these `authorization` headers, or "" to permit it.

    Args:
        credentials: The job's certificates and token, as its servers have them.
        authorizations: All `authorization` headers of the call. A call with several is always refused.
        only_reads: True if the call changes nothing, so that the token of readers is permitted too.
    """
    if len(authorizations) != 1:
        return f"it carries {len(authorizations) or 'no'} token{'s' * (len(authorizations) > 1)}"
    [authorization] = authorizations
    if is_permitted(credentials, authorization, only_reads=only_reads):
        return ""
    if is_permitted(credentials, authorization, only_reads=True):
        return "its token is that of readers, which only follow the job and read its figures"
    return "its token is not this job's"
