"""HTTPS with a certificate and a key from files, which are reloaded when they change."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import NamedTuple

from pipeinfer.errors import UsageError

_LOOK_SECONDS = 30.0
_log = logging.getLogger("pipeinfer.server")


class Files(NamedTuple):
    """The paths of the certificate and its key."""

    certificate: str
    key: str


class _Encrypted(Exception):
    pass


def check(certificate: str, key: str) -> Files:
    """Return absolute paths of files that can be used, or two empty texts. Raises UsageError."""
    if not certificate and not key:
        return Files("", "")
    if not certificate or not key:
        raise UsageError("--ssl-cert-file and --ssl-key-file go together: give both, or neither")
    files = Files(*(str(Path(name).resolve()) for name in (certificate, key)))
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    return files


def _load(context: ssl.SSLContext, files: Files) -> None:
    def password() -> str:
        raise _Encrypted  # or the library would ask for it at the terminal

    for option, path in zip(("--ssl-cert-file", "--ssl-key-file"), files, strict=True):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise UsageError(f"{option} {path} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(*files, password)
    except _Encrypted:
        raise UsageError(f"--ssl-key-file {files.key} has a password: write it without one "
                         "(openssl pkey -in FILE -out NEW), readable by this user alone") from None
    except (ssl.SSLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise UsageError(f"--ssl-cert-file {files.certificate} and --ssl-key-file {files.key} are "
                         f"no certificate with its key, both as PEM ({reason})") from error


async def renew(context: ssl.SSLContext, files: Files, seconds: float = _LOOK_SECONDS) -> None:
    """Reload the files whenever they have changed, for connections from then on.

    seconds: between two checks.
    """
    seen = _state(files)
    # no signal tells of a renewed certificate
    while True:
        await asyncio.sleep(seconds)
        if (now := _state(files)) == seen:
            continue
        seen = now
        try:
            await asyncio.to_thread(check, *files)  # before the context, which is in use
            _load(context, files)
        except UsageError as error:
            _log.warning("%s; the certificate of before stays", error)
        else:
            _log.warning("a new certificate is there: %s", files.certificate)


def _state(files: Files) -> list[tuple[int, int, int]]:
    found = []
    for path in files:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_ino, status.st_size))
        except OSError:
            found.append((0, 0, 0))
    return found
