"""Images by URL, for a server that must not be talked into reading what lies behind its own firewall."""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
from typing import Any
from urllib.parse import urlsplit


GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class FetchError(ValueError):
    """Why a URL was not fetched, in words for who asked."""


def public_address(host: str, port: int) -> str:
    """An address of a host, all of whose addresses belong to the public Internet.

    Raises:
        FetchError: there is none, or one of them is private, local, or reserved.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError):
        found = []
    if not found or not all(map(is_public, found)):  # one message for both: names of a private network are private
        raise FetchError(f"{host} is not on the public Internet")
    return found[0]


def is_public(address: str) -> bool:
    """Not so are IPv6 addresses that carry one of IPv4: that may be any."""
    ip: Any = ipaddress.ip_address(address.partition("%")[0])
    if ip.version == 6 and (ip not in GLOBAL_UNICAST or ip.sixtofour or ip.teredo):  # these lead on to IPv4
        return False
    return ip.is_global and not ip.is_multicast


class PinnedConnection(http.client.HTTPConnection):
    """To the address that was checked, whatever the name stands for by now."""

    def __init__(self, host: str, port: int, address: str, timeout: float, context: ssl.SSLContext | None):
        super().__init__(host, port, timeout=timeout)
        self.address, self.context, self.was_cut = address, context, False

    def connect(self) -> None:
        self.sock = socket.create_connection((self.address, self.port), self.timeout)
        if self.context is not None:
            self.sock = self.context.wrap_socket(self.sock, server_hostname=self.host)
        if self.was_cut:  # while there was no socket to cut
            raise TimeoutError

    def cut(self) -> None:
        """End it from another thread, whatever it waits for."""
        self.was_cut = True
        with contextlib.suppress(OSError, AttributeError):  # closed, or not open yet
            self.sock.shutdown(socket.SHUT_RDWR)


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
    connection = PinnedConnection(host, port, public_address(host, port), seconds, context)
    # A timeout of the socket counts anew with each byte that comes; this one does not.
    timer = threading.Timer(seconds, connection.cut)
    timer.start()
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
        if connection.was_cut:
            raise FetchError(f"the URL took more than {seconds:g} seconds")
        return bytes(content)
    except FetchError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise FetchError(f"the URL cannot be fetched: {type(error).__name__}") from error
    finally:
        timer.cancel()
        connection.close()
