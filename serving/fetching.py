"""Images by URL, for a server that must not be talked into reading what lies behind its own firewall."""

import http.client
import ipaddress
import socket
import ssl
import time
from typing import Any
from urllib.parse import urlsplit


class FetchError(ValueError):
    """Why a URL was not fetched, in words for who asked."""


def public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses belong to the public Internet.

    Raises:
        FetchError: there is none, or one of them is private, local, or reserved.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        raise FetchError(f"{host} has no address") from error
    for address in found:
        if not is_public(address):
            raise FetchError(f"{host} is not on the public Internet")
    return sorted(found)[0]


def is_public(address: str) -> bool:
    """Also of IPv6 addresses that carry one of IPv4."""
    ip: Any = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(ip, "ipv4_mapped", None) or getattr(ip, "sixtofour", None)
    if getattr(ip, "teredo", None) or ip in ipaddress.ip_network("64:ff9b::/96"):
        return False
    return ip.is_global and not ip.is_multicast and (inner is None or is_public(str(inner)))


class PinnedConnection(http.client.HTTPConnection):
    """To the address that was checked, whatever the name stands for by now."""

    def __init__(self, host: str, port: int, address: str, timeout: float, context: ssl.SSLContext | None):
        super().__init__(host, port, timeout=timeout)
        self.address, self.context = address, context

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)
        if self.context is not None:
            self.sock = self.context.wrap_socket(self.sock, server_hostname=self.host)


def fetch(url: str, max_bytes: int, seconds: float) -> bytes:
    """The content behind an http or https URL on the public Internet. Redirects are not followed.

    Raises:
        FetchError: another kind of URL or address, no answer in time, an answer that is not 200, or a long one.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError as error:
        raise FetchError(f"the URL cannot be read: {error}") from error
    if not host or port is None or parts.scheme not in ("http", "https") or parts.username or parts.password:
        raise FetchError("the URL must be http:// or https:// with a host, and no user")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    context = ssl.create_default_context() if parts.scheme == "https" else None
    end = time.monotonic() + seconds
    connection = PinnedConnection(host, port, public_address(host, port), seconds, context)
    try:
        connection.request("GET", target, headers={"User-Agent": "traffic-vlm", "Accept": "image/*"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise FetchError(f"the URL answered {answer.status}; redirects are not followed")
        content = bytearray()
        while piece := answer.read1(65536):
            content += piece
            if len(content) > max_bytes:
                raise FetchError(f"the URL has more than {max_bytes:,} bytes")
            if time.monotonic() > end:
                raise FetchError(f"the URL took more than {seconds:g} seconds")
        return bytes(content)
    except FetchError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"the URL cannot be fetched: {type(error).__name__}") from error
    finally:
        connection.close()
