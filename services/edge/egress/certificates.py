"""Certificates for hosts whose requests the gate changes.

Owns: the node's own authority, kept in a private file so that sandboxes trust it over a
restart, and the certificate of one host at a time. Does not own: which hosts, what is
said. The authority is trusted in sandboxes of this node alone, nowhere else.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections import OrderedDict
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS, AUTHORITY_LEFT_DAYS = 3650, 400
"""One with less left is made anew."""
HOST_DAYS, HOST_LEFT_DAYS = 30, 10
SKEW = datetime.timedelta(hours=1)
HOSTS_MAX = 256
"""Of which the certificate is kept."""
ALPN = "http/1.1"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )  # fmt: skip


class Authority:
    """The node's. Made on first use; blocking, a few milliseconds."""

    def __init__(self, path: Path, *, roots: Path | None = None) -> None:
        self._path, self._roots = path, roots
        self._key, self._certificate = self._load() or self._make()
        self._host_key = ec.generate_private_key(ec.SECP256R1())
        self._hosts: OrderedDict[str, tuple[datetime.datetime, ssl.SSLContext]] = OrderedDict()

    @property
    def pem(self) -> bytes:
        """Its certificate."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def bundle(self) -> bytes:
        """What a sandbox trusts: what the node trusts, and this authority."""
        found = ssl.get_default_verify_paths().cafile
        public = Path(found).read_bytes() if found else b""
        return public + self._extra() + self.pem

    def outside(self) -> ssl.SSLContext:
        """What the gate trusts: the node's roots and those that its operator named."""
        context = ssl.create_default_context()
        if extra := self._extra():
            context.load_verify_locations(cadata=extra.decode())
        context.set_alpn_protocols([ALPN])
        return context

    def _extra(self) -> bytes:
        return self._roots.read_bytes() if self._roots else b""

    def inside(self, host: str) -> ssl.SSLContext:
        """A server's context that shows a certificate of ``host``."""
        until, context = self._hosts.get(host, (_now(), None))
        if context is None or until - _now() < datetime.timedelta(days=HOST_LEFT_DAYS):
            until, context = self._hosts[host] = self._issue(host)
        self._hosts.move_to_end(host)
        while len(self._hosts) > HOSTS_MAX:
            self._hosts.popitem(last=False)
        return context

    def _issue(self, host: str) -> tuple[datetime.datetime, ssl.SSLContext]:
        until = _now() + datetime.timedelta(days=HOST_DAYS)
        made = (
            self._builder(_name(host[:64]), until)
            .public_key(self._host_key.public_key())
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols([ALPN])
        chain = made.public_bytes(serialization.Encoding.PEM) + self.pem
        _load_chain(context, _pem(self._host_key) + chain)
        return until, context

    def _builder(self, subject: x509.Name, until: datetime.datetime) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._issuer)
            .serial_number(x509.random_serial_number())
            .not_valid_before(_now() - SKEW)
            .not_valid_after(until)
        )

    @property
    def _issuer(self) -> x509.Name:
        return _name("dsec gate")

    def _load(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None:
        try:
            data = self._path.read_bytes()
            key = serialization.load_pem_private_key(data, None)
            certificate = x509.load_pem_x509_certificate(data)
        except (OSError, ValueError):
            return None
        left = certificate.not_valid_after_utc - _now()
        usable = isinstance(key, ec.EllipticCurvePrivateKey)
        if not usable or left < datetime.timedelta(days=AUTHORITY_LEFT_DAYS):
            return None
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, certificate

    def _make(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        until = _now() + datetime.timedelta(days=AUTHORITY_DAYS)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False,
            data_encipherment=False, key_agreement=False, key_cert_sign=True, crl_sign=True,
            encipher_only=False, decipher_only=False,
        )  # fmt: skip
        certificate = (
            self._builder(self._issuer, until)
            .public_key(key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .sign(key, hashes.SHA256())
        )
        data = _pem(key) + certificate.public_bytes(serialization.Encoding.PEM)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            os.fsync(fd)
        os.replace(temporary, self._path)
        return key, certificate


def _load_chain(context: ssl.SSLContext, pem: bytes) -> None:
    """From memory: the library reads files only, and a key is not to lie in one."""
    fd = os.memfd_create("chain", os.MFD_CLOEXEC)
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
