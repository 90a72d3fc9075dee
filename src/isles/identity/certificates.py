"""The run's certificates: one authority, and one certificate for each cluster and each member of the store.

P-256, because every TLS library takes it. A certificate's common name and DNS name are the cluster's name, which is all that clusters know each
other by; addresses may change at will.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

YEARS = 5  # a run is over long before; who is to be shut out earlier needs a new run
SLACK = dt.timedelta(days=1)  # clocks of hosts may be off by so much


@dataclass(frozen=True)
class Certified:
    """A certificate and its private key, as PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "Certified(...)"


def make_authority(run: str) -> Certified:
    """A self-signed certificate that signs others of this run and nothing else."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"isles run {run}")
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = _builder(name, name, key).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return _certified(builder.add_extension(usage, critical=True).sign(key, hashes.SHA256()), key)


def issue(authority: Certified, name: str, addresses: Sequence[str] = ()) -> Certified:
    """A certificate for `name`, as server and as client. addresses: host names and IP addresses that it stands for besides."""
    signer = x509.load_pem_x509_certificate(authority.certificate.encode())
    signing = serialization.load_pem_private_key(authority.key.encode(), None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise TypeError("the authority's key is no P-256 key")
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([x509.DNSName(name), *(_general(a) for a in addresses)])
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    builder = (
        _builder(_name(name), signer.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .add_extension(usage, critical=False)
    )
    return _certified(builder.sign(signing, hashes.SHA256()), key)


def _general(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SLACK)
        .not_valid_after(now + dt.timedelta(days=365 * YEARS))
    )


def _certified(certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> Certified:
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return Certified(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())
