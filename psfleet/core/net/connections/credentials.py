"""Credentials of a fleet over TCP: the job's certificates and its token, as files in a folder.

    ca.pem      the job's own certificate authority: a peer without a certificate of it is a stranger
    cert.pem    this role's certificate
    key.pem     its private key, for its owner only
    token       the job's secret word, sent with every call

Both ends show a certificate (mutual TLS). A server's certificate is made out to `SERVER_NAME` and not
to a host: only the job's launcher makes them, so whoever has one is a server of the job, wherever it
runs. A worker's certificate is not good for a server, so a worker cannot pose as one. A reader's token is
made of the job's, so that servers know both and a reader knows only its own.
"""

import hashlib
import hmac
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from psfleet.core.base.errors import ConfigError

SERVER_NAME = "psfleet-server"
FILES = ("ca.pem", "cert.pem", "key.pem", "token")
_LONGEST = 1 << 16  # bytes of one of these files
_FEWEST = 16  # characters of a token
_OTHERS, _GROUP, _GROUP_CHANGES = 0o007, 0o070, 0o030


CERTIFICATE_DAYS = 30.0


@dataclass(frozen=True)
class Credentials:
    """Credentials of one role of one job. `repr` shows no secret."""

    folder: Path

    @classmethod
    def read(cls, folder: str | Path) -> "Credentials":
        """Return the credentials in a folder.

        Raises:
            ConfigError: A file is missing or empty, or others than its owner can get at a secret.
        """
        credentials = cls(Path(folder))
        for name in FILES:
            credentials._content(name)
        if len(credentials.token) < _FEWEST or not credentials.token.isascii():
            raise ConfigError(
                f"{str(credentials.folder / 'token')!r} holds no token of at least {_FEWEST} letters; "
                "make new credentials with: psfleet certs FOLDER"
            )
        return credentials

    @cached_property
    def ca(self) -> bytes:
        """The authority's certificate, PEM."""
        return self._content("ca.pem")

    @cached_property
    def certificate(self) -> bytes:
        """This role's certificate, PEM."""
        return self._content("cert.pem")

    @cached_property
    def key(self) -> bytes:
        """Its private key, PEM."""
        return self._content("key.pem")

    @cached_property
    def token(self) -> str:
        """The job's secret word."""
        return self._content("token").decode("ascii", "replace").strip()

    @cached_property
    def bearer(self) -> str:
        """Authorization header of every call."""
        return f"Bearer {self.token}"

    def allows(self, authorization: str | bytes, *, reads: bool) -> bool:
        """Return whether a call with this header may be answered; `reads`: it is one that only reads."""
        header = (
            authorization.encode("utf-8", "replace")
            if isinstance(authorization, str)
            else authorization
        )
        expected = [self.bearer.encode(), self._readers][: 2 if reads else 1]
        return any(hmac.compare_digest(header, each) for each in expected)

    def refusal(self, authorizations: Sequence[str | bytes], *, reads: bool) -> str:
        """Say why a call with these headers `authorization` is not answered, or return "" if it is.

        Args:
            authorizations: All of the call. One that carries several is refused even if all are right.
            reads: True if the call only reads.
        """
        if len(authorizations) != 1:
            return (
                f"it carries {len(authorizations) or 'no'} token{'s' * (len(authorizations) > 1)}"
            )
        [authorization] = authorizations
        if self.allows(authorization, reads=reads):
            return ""
        if self.allows(authorization, reads=True):
            return "its token is that of readers, which only follow the job and read its figures"
        return "its token is not this job's"

    @cached_property
    def _readers(self) -> bytes:
        return f"Bearer {reader_token(self.token)}".encode()

    def _content(self, name: str) -> bytes:
        path = self.folder / name
        try:
            status = path.stat()
            with path.open("rb") as file:
                content = file.read(_LONGEST)
        except OSError as error:
            raise ConfigError(
                f"credential {str(path)!r} cannot be read ({error.strerror}); name a folder that the "
                "launcher or `psfleet certs` has made, as PSFLEET_TLS and --agent-credentials do"
            ) from None
        if name in ("key.pem", "token"):
            _refuse_if_open(path, status)
        if not content.strip():
            raise ConfigError(f"credential {str(path)!r} is empty; make new ones: psfleet certs")
        return content


def reader_token(token: str) -> str:
    """Return the token of a job's readers, from which the job's token cannot be found."""
    return hmac.new(token.encode(), b"psfleet reader", hashlib.sha256).hexdigest()


def _refuse_if_open(path: Path, status: os.stat_result) -> None:
    """Refuse a secret that others than its owner can get at.

    The group may read it if the file is not this user's: so a secret is mounted for a process that is
    not root, as Kubernetes does with fsGroup (ssh draws the same line).
    """
    mode = stat.S_IMODE(status.st_mode)
    mask = _GROUP if status.st_uid == os.geteuid() else _GROUP_CHANGES
    who = "every user" if mode & _OTHERS else "its group" if mode & mask else ""
    if who:
        raise ConfigError(
            f"{str(path)!r} has mode {mode:o}: {who} can get at it; chmod 600 it, and "
            "make new credentials if somebody may have read it"
        )
