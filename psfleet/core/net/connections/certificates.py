"""Creates a job's own certificates: one authority, and a certificate for each role signed by it.

The authority's key exists only in memory while `make_credentials` runs. It is never written, so no further
certificate of the job can be created later, not even by the job itself. Certificates are X.509 (RFC 5280)
with keys on the curve P-256. credentials.py describes the files and reads them.
"""

import datetime
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.net.connections.credentials import CERTIFICATE_DAYS, SERVER_NAME, reader_token

# Certificates are valid from one hour ago, because clocks of other hosts may be behind.
_SKEW = datetime.timedelta(hours=1)
_LONGEST_VALIDITY = 3650.0
_BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
_ROLES = {
    "server": (SERVER_NAME, _BOTH),  # servers also call each other
    "worker": ("psfleet-worker", (ExtendedKeyUsageOID.CLIENT_AUTH,)),
    "reader": ("psfleet-reader", (ExtendedKeyUsageOID.CLIENT_AUTH,)),
}

_Key = ec.EllipticCurvePrivateKey


def make_credentials(folder: str | Path, days: float = CERTIFICATE_DAYS) -> dict[str, Path]:
    """Create the credentials of a new job in `folder`/server, `folder`/worker and `folder`/reader.

    Args:
        folder: Created with mode 0700 if it does not exist. Files get mode 0600 and replace earlier ones.
        days: Days until the certificates expire.

    Returns:
        Maps the name of each role to the role's folder. A process of the role gets this folder in
        PSFLEET_TLS.

    Raises:
        ConfigError: The folder cannot be written, or `days` is out of range.
    """
    if not 0 < days <= _LONGEST_VALIDITY:
        raise ConfigError(
            f"days is {days:g}; certificates can last up to {_LONGEST_VALIDITY:g} days"
        )
    folder = local_path(folder)
    authority = _CertificateAuthority.make(datetime.timedelta(days=days))
    token = secrets.token_urlsafe(32)
    folders = {role: folder / role for role in _ROLES}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role, role_folder in folders.items():
            role_folder.mkdir(mode=0o700, exist_ok=True)
            key = ec.generate_private_key(ec.SECP256R1())
            _write(role_folder / "ca.pem", _pem(authority.certificate))
            _write(role_folder / "cert.pem", _pem(authority.sign(key, *_ROLES[role])))
            _write(role_folder / "key.pem", _private(key))
            role_token = reader_token(token) if role == "reader" else token
            _write(role_folder / "token", role_token.encode())
    except OSError as error:
        raise ConfigError(
            f"credentials cannot be written to {str(folder)!r} ({error.strerror}); choose another folder"
        ) from None
    return folders


def ends(certificate: bytes) -> datetime.datetime:
    """Return the time at which a certificate in PEM format expires, in UTC.

    Raises:
        ConfigError: The certificate is damaged.
    """
    try:
        return x509.load_pem_x509_certificate(certificate).not_valid_after_utc
    except ValueError:
        raise ConfigError(
            "the certificate is damaged; make new ones: psfleet certs FOLDER"
        ) from None


@dataclass(frozen=True)
class _CertificateAuthority:
    key: _Key
    certificate: x509.Certificate

    @classmethod
    def make(cls, validity: datetime.timedelta) -> "_CertificateAuthority":
        key = ec.generate_private_key(ec.SECP256R1())
        # A random name: OpenSSL looks up an issuer by name, so equal names of two jobs would be confused.
        name = _name(f"psfleet job {secrets.token_hex(8)}")
        builder = (
            _begun(key, name, name, validity)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
        )
        return cls(key, builder.sign(key, hashes.SHA256()))

    def sign(
        self, key: _Key, name: str, purposes: tuple[x509.ObjectIdentifier, ...]
    ) -> x509.Certificate:
        """Return a certificate for this key, name and purposes.

        It expires at the same time as the authority.
        """
        issuer = self.certificate
        validity = issuer.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        return (
            _begun(key, _name(name), issuer.subject, validity)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()),
                critical=False,
            )
            .sign(self.key, hashes.SHA256())
        )


def _begun(
    key: _Key, subject: x509.Name, issuer: x509.Name, validity: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + validity)
    )


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private(key: _Key) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Write a secret file. Other users cannot read it at any moment, not even before it is complete."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
