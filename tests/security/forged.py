"""Certificates that the launcher would not make: expired ones, with other names, for other uses."""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

TOKEN = "of-this-job-" * 4
SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
_DAY = datetime.timedelta(days=1)


class Forge:
    """An authority whose key is kept."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        name = _name("authority")
        self.certificate = (
            _builder(name, name, self.key, 5)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def write(
        self,
        folder: Path,
        name: str = "psfleet-server",
        uses: tuple[x509.ObjectIdentifier, ...] = (SERVER, CLIENT),
        days: float = 1,
        token: str = TOKEN,
    ) -> Path:
        """Credentials whose certificate ends in so many days (less than 0: it has ended)."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(_name(name), self.certificate.subject, key, days)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        folder.mkdir(parents=True)
        pem = serialization.Encoding.PEM
        private = key.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        for file, content in {
            "ca.pem": self.certificate.public_bytes(pem),
            "cert.pem": certificate.public_bytes(pem),
            "key.pem": private,
            "token": token.encode(),
        }.items():
            (folder / file).write_bytes(content)
            (folder / file).chmod(0o600)
        return folder


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 10 * _DAY)
        .not_valid_after(now + days * _DAY)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
