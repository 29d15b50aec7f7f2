"""Tokens: what a machine needs besides the head's address to join it; and the head's certificate.

A token holds its id, a secret, and the fingerprint of the head's certificate. A machine checks the
fingerprint before it sends the secret over TLS, so no other head can read it (as kubeadm does).
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import hmac
import json
import os
import secrets
import ssl
import time
from pathlib import Path

import msgspec
from msgspec import Struct, structs

from pipeinfer.errors import UsageError
from pipeinfer.files import write_atomically

_PREFIX = "pipeinfer-"
_ID, _SECRET, _PRINT = 4, 16, 20  #: bytes
_CERTIFICATE, _TOKENS = "head.pem", "tokens.json"
_YEARS = 30
_MEMBERS = 256  #: machines that a token remembers


class JoinToken(Struct, frozen=True):
    """id, secret, fingerprint: in hexadecimal."""

    id: str
    secret: str
    fingerprint: str

    @property
    def text(self) -> str:
        """The token as it is handed over."""
        raw = bytes.fromhex(self.id + self.secret + self.fingerprint)
        return _PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")

    @classmethod
    def of(cls, text: str) -> JoinToken:
        """Return the token of a text. Raises UsageError."""
        body = text.strip().removeprefix(_PREFIX)
        try:
            raw = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) != _ID + _SECRET + _PRINT or not text.strip().startswith(_PREFIX):
            raise UsageError("this is no token: `pipeinfer up --join` prints one that begins with "
                             f"{_PREFIX}, and `pipeinfer tokens --new` makes another")
        return cls(raw[:_ID].hex(), raw[_ID:_ID + _SECRET].hex(), raw[_ID + _SECRET:].hex())


def fingerprint(certificate: bytes) -> str:
    """Return the fingerprint of a certificate in DER."""
    return hashlib.sha256(certificate).hexdigest()[:2 * _PRINT]


class Issued(Struct, frozen=True):
    """A token that the head has made. made, until: seconds since 1970; until 0: no end.

    members: ids of the machines that have joined by it; these come back after its end, too.
    """

    id: str
    secret: str
    made: float
    until: float = 0.0
    members: tuple[str, ...] = ()

    def proves(self, secret: str) -> bool:
        """Whether this is the token's secret."""
        return hmac.compare_digest(self.secret.encode(), secret.encode())

    def admits(self, member: str, now: float) -> bool:
        """Whether a machine may join by it, or come back."""
        return not self.until or now < self.until or member in self.members


class JoinTokens:
    """The head's certificate and tokens, in a folder that only its user reads."""

    def __init__(self, folder: Path) -> None:
        """Make the certificate if there is none. Raises UsageError if it cannot be read or
        written."""
        self._folder = folder
        path = folder / _CERTIFICATE
        if not path.exists():
            _write(path, _self_signed())
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            self.context.load_cert_chain(path)
            pem = path.read_text(encoding="ascii")
        except (OSError, ValueError) as error:  # SSLError is the former
            raise UsageError(f"{path} cannot be used ({error}): remove it, and give the machines "
                             "that join a new token") from error
        self.fingerprint = fingerprint(ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERT"):]))

    def issued(self) -> list[Issued]:
        """Return all tokens that are not revoked. Raises UsageError."""
        path = self._folder / _TOKENS
        if not path.exists():
            return []
        try:
            return msgspec.json.decode(path.read_bytes(), type=list[Issued])
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read ({error}): remove it, and give the machines "
                             "that join a new token") from error

    def find(self, id: str) -> Issued | None:
        """Return the token with this id, None if it was never made or is revoked."""
        return next((one for one in self.issued() if one.id == id), None)

    def token(self, issued: Issued) -> JoinToken:
        """Return a token as it is handed over."""
        return JoinToken(issued.id, issued.secret, self.fingerprint)

    def new(self, seconds: float = 0.0) -> Issued:
        """Make a token. seconds: until its end, 0 for none."""
        now = time.time()
        made = Issued(secrets.token_hex(_ID), secrets.token_hex(_SECRET), now,
                      now + seconds if seconds else 0.0)
        self._store([*self.issued(), made])
        return made

    def usable(self) -> Issued:
        """Return the newest token that admits new machines; make one if there is none."""
        found = [one for one in self.issued() if one.admits("", time.time())]
        return found[-1] if found else self.new()

    def revoke(self, id: str) -> bool:
        """Let a token admit nobody any more; return whether there was one."""
        before = self.issued()
        self._store([one for one in before if one.id != id])
        return any(one.id == id for one in before)

    def joined(self, id: str, member: str) -> None:
        """Store that a machine has joined by a token."""
        found = self.issued()
        if any(one.id == id and member not in one.members for one in found):
            self._store([structs.replace(one, members=(*one.members, member)[-_MEMBERS:])
                         if one.id == id else one for one in found])

    def _store(self, issued: list[Issued]) -> None:
        _write(self._folder / _TOKENS, json.dumps([structs.asdict(one) for one in issued]))


def _write(path: Path, text: str) -> None:
    """Write a file that only this user reads. Raises UsageError."""
    before = os.umask(0o077)
    try:
        write_atomically(path, text)
    finally:
        os.umask(before)


def _self_signed() -> str:
    """Return a private key and its certificate in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pipeinfer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (x509.CertificateBuilder().subject_name(name).issuer_name(name)
                   .public_key(key.public_key()).serial_number(x509.random_serial_number())
                   .not_valid_before(now - datetime.timedelta(days=1))
                   .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
                   .sign(key, hashes.SHA256()))
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                               serialization.NoEncryption())
    return secret.decode() + certificate.public_bytes(serialization.Encoding.PEM).decode()
