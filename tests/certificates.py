"""Certificates for tests: an authority, and what a cluster of a name shows."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class TestAuthority:
    """Signs certificates whose common name and DNS name are a cluster's."""

    __test__ = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test authority")])
        self._certificate = self._sign(self._name, self._key, ca=True)
        (folder / "ca.pem").write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def contexts(self, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Server's and client's context of a cluster."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key)
        path = self.folder / f"{name}.pem"
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        path.write_bytes(private + certificate.public_bytes(serialization.Encoding.PEM))
        return self.load(self.folder, name)

    @staticmethod
    def load(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """The contexts of a cluster whose certificate is in a folder already."""
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(folder / "ca.pem")
            context.load_cert_chain(folder / f"{name}.pem")
        return server, client

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePrivateKey, *, ca: bool = False) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        common = name.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(self._name).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(days=1)).not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(str(common))]), critical=False)
        )  # fmt: skip
        return builder.sign(self._key, hashes.SHA256())


def peer_name(secured: ssl.SSLObject) -> str:
    """The common name of the certificate that the other side showed."""
    certificate = secured.getpeercert()
    assert certificate
    return next(value for part in certificate["subject"] for key, value in part if key == "commonName")  # type: ignore[union-attr,index,misc]
