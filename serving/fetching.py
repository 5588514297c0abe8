"""Fetch images by URL, from public addresses only: the server must not be used to read its own network (SSRF)."""

import asyncio
import ipaddress
import socket

import aiohttp
from yarl import URL


GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


class FetchError(ValueError):
    """The URL cannot be fetched. The message is meant for the client."""


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public Internet; IPv6 addresses that embed an IPv4 address do not."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and (ip not in GLOBAL_UNICAST or ip.sixtofour or ip.teredo):
        return False
    return ip.is_global and not ip.is_multicast


async def public_address(host: str, port: int) -> str:
    """Resolve a host and return one of its addresses.

    Raises:
        FetchError: it has no address, or one of them is not public.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        found = []
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not all(map(is_public, addresses)):  # one message for both: do not reveal private names
        raise FetchError(f"{host} is not on the public Internet.")
    return addresses[0]


async def fetch(url: str, max_bytes: int, seconds: float) -> bytes:
    """Return the content of an http or https URL on the public Internet. Redirects are refused.

    Raises:
        FetchError: another kind of URL or address, a status other than 200, more than `max_bytes`, or no complete
            response within `seconds`.
    """
    try:
        parsed = URL(url)
    except ValueError as error:
        raise FetchError(f"the URL cannot be read: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.raw_host or not parsed.port or parsed.raw_user is not None:
        raise FetchError("the URL must be http:// or https:// with a host and without a user.")
    try:
        async with asyncio.timeout(seconds):
            # Connect to the address that was checked: the name could resolve to another one the next time.
            pinned = parsed.with_host(await public_address(parsed.raw_host, parsed.port))
            headers = {"Host": parsed.raw_authority, "User-Agent": "traffic-vlm", "Accept-Encoding": "identity"}
            async with (
                aiohttp.ClientSession(auto_decompress=False, trust_env=False) as session,
                session.get(
                    pinned, headers=headers, allow_redirects=False, server_hostname=parsed.raw_host
                ) as response,
            ):
                if response.status != 200:
                    raise FetchError(f"the URL answered {response.status}; redirects are not followed.")
                content = bytearray()
                async for piece in response.content.iter_chunked(65536):
                    content += piece
                    if len(content) > max_bytes:
                        raise FetchError(f"the URL has more than {max_bytes:,} bytes.")
                return bytes(content)
    except FetchError:
        raise
    except TimeoutError as error:
        raise FetchError(f"the URL took more than {seconds:g} seconds.") from error
    except (OSError, aiohttp.ClientError, ValueError) as error:
        raise FetchError(f"the URL cannot be fetched: {type(error).__name__}.") from error
