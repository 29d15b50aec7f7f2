"""Decides which web pages may use the server, by its host names and the origin of a request.

A browser sends requests of any page to any address. A page of another site is recognised by the
browser's headers (`Origin`, `Sec-Fetch-Site`), or by the host name, if that name was made to point
to this machine. Programs other than browsers send none of these headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pipeinfer.server.errors import ApiError

_OWN_SITES = (b"same-origin", b"none")


@dataclass(frozen=True, slots=True)
class Origins:
    """The allowed names and origins.

    names: host names of the server, besides localhost and addresses. strict: refuse other names.
    allowed: origins of other sites that may use it, "*" for all.
    """

    names: tuple[str, ...]
    strict: bool
    allowed: tuple[str, ...] = ()

    def check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise ApiError (403) for a request that a page of another site may have made."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self.strict and host and not self._goes_by(_name(f"//{host}")):
            raise ApiError(403, f"this server does not go by the host name {host[:300]!r}: use its "
                                "address, or start it with --allow-host NAME",
                           code="host_not_allowed")
        if "*" in self.allowed or not self._is_foreign(method, host, headers):
            return
        origin = headers.get(b"origin", b"").decode("latin-1")
        raise ApiError(403, f"a page of another site ({origin[:300] or 'not named'}) made this "
                            "request: start the server with --cors-origin to let that site use "
                            "it",
                       code="origin_not_allowed")

    def _goes_by(self, name: str) -> bool:
        if name in ("localhost", *self.names):
            return True
        try:  # an address is safe: only names can be made to point here
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def _is_foreign(self, method: str, host: str, headers: Mapping[bytes, bytes]) -> bool:
        origin = headers.get(b"origin", b"").decode("latin-1")
        if origin and origin in self.allowed:
            return False
        site = headers.get(b"sec-fetch-site")
        if site is not None:
            follows_a_link = (method in ("GET", "HEAD") and not origin
                              and headers.get(b"sec-fetch-mode") == b"navigate"
                              and headers.get(b"sec-fetch-dest") == b"document")
            return site not in _OWN_SITES and not follows_a_link
        if not origin:
            return False
        return origin.partition("://")[2] != host and _name(origin) not in self.names


def _name(url: str) -> str:
    """Return the host name of an address in lower case; "" if it has none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
