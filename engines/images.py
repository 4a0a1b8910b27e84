"""Images by address: the gateway fetches them, so that no request reaches into the network that the engine stands in.

Only http and https, only public addresses, unless the setting `image_urls` names a host. A name is looked up once, every
address that it has is judged, and the connection goes to one of these, so that a name which changes meanwhile gains nothing;
TLS is verified against the name. Each redirect is judged anew. What comes is bounded in bytes and in time, never unpacked, and
is an image by its first bytes, whatever its headers say.

Source: OWASP's advice on server-side request forgery; the IANA registries of special-purpose addresses (RFC 6890).
"""

import re
import ssl
from base64 import b64encode
from functools import cache
from ipaddress import IPv4Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import gevent
from gevent import socket
from gevent.lock import BoundedSemaphore
from gevent.monkey import get_original
from gevent.threadpool import ThreadPool

from errors import InvalidRequest, TooLarge, UpstreamError
from engines.http1 import Answer, Connection

PORTS = {"http": 80, "https": 443}
REDIRECTS = 3
MOVED = (301, 302, 303, 307, 308)
MOST_AT_ONCE = 64  # fetches of all requests together
TRIES = 3  # addresses of a name
LONGEST = 8192  # characters of an address
LONG = 3600  # seconds: the time of all is measured elsewhere
ENOUGH = 16  # bytes that tell what it is
SAFE = "/:=&?~#+!$,;'@()*[]%"  # stay as they are in a path
HEADERS = "User-Agent: sparks-gateway\r\nAccept: image/*\r\nAccept-Encoding: identity\r\nConnection: close\r\n\r\n"
KINDS = [
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.S), "webp"),
]
SEND_IT = "; send the image itself, as a data URL (data:image/png;base64,...)"

live = BoundedSemaphore(MOST_AT_ONCE)


class Target(NamedTuple):
    """Where an address leads. `named`: the settings name this host."""

    secure: bool
    host: str
    port: int
    path: str
    named: bool


# ---- which addresses may be connected to

# What Python's own is_global lets pass, or judges differently from version to version.
CLOSED = [
    ip_network(net)
    for net in (
        "0.0.0.0/8",
        "100.64.0.0/10",
        "192.0.0.0/24",
        "192.88.99.0/24",
        "198.18.0.0/15",
        "240.0.0.0/4",
        "168.63.129.16/32",  # Azure's own services, at every machine there
        "2001::/23",
        "2001:db8::/32",
        "2002::/16",
        "3fff::/20",  # Teredo and relatives, documentation, 6to4
    )
]
UNICAST = ip_network("2000::/3")  # all of IPv6 that is handed out
NAT64 = ip_network("64:ff9b::/96")


def is_public(text):
    """Whether an address (a text) is one of the public internet, judging what it holds where it wraps another one."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if address.version == 6:
        if address.ipv4_mapped or address in NAT64:
            return is_public(str(IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.scope_id or address not in UNICAST:
            return False
    return (
        address.is_global
        and not address.is_multicast
        and not any(address in net for net in CLOSED if net.version == address.version)
    )


def is_own(text):
    """Whether an address is this machine's own: what it sends there, it sends from there. (Nothing is sent.)"""
    with socket.socket(
        socket.AF_INET6 if ":" in text else socket.AF_INET, socket.SOCK_DGRAM
    ) as sock:
        try:
            sock.connect((text, 9))
            return sock.getsockname()[0] == text
        except OSError:
            return False


def target_of(url, hosts):
    """Where a URL leads. `hosts` is the setting image_urls. Raises InvalidRequest where it must not."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        host = host if host.isascii() else host.encode("idna").decode()
        port = PORTS.get(parts.scheme) if parts.port is None else parts.port
    except ValueError:
        raise bad("an image's address cannot be read") from None
    if (
        parts.scheme not in PORTS
        or len(url) > LONGEST
        or not url.isprintable()
        or "\\" in parts.netloc
    ):
        raise bad("an image's address must be a plain http or https one")
    if "@" in parts.netloc:
        raise bad("an image's address must not hold a user or a password")
    host = host.removesuffix(".")
    if not is_host(host):
        raise bad(f"{host[:100]!r} in an image's address is no host")
    named = is_named(host, port, hosts)
    if not named and "public" not in hosts:
        raise bad(f"images at {host} are not fetched here")
    if not named and port not in PORTS.values():
        raise bad(f"images are fetched from the ports 80 and 443 only, not from {port}")
    path = quote(parts.path or "/", SAFE) + (f"?{quote(parts.query, SAFE)}" if parts.query else "")
    return Target(parts.scheme == "https", host, port, path, named)


def is_host(host):
    """Whether a host is a name, or an address in its usual form: others (2130706433, 0x7f.1, 017700000001) mean no good."""
    try:
        return ip_address(host).version in (4, 6) and "%" not in host
    except ValueError:
        last = host.rpartition(".")[2]
        return (
            bool(re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host))
            and len(host) < 254
            and not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last)
        )


def is_named(host, port, hosts):
    bare = f"[{host}]" if ":" in host else host
    return f"{bare}:{port}" in hosts or bare in hosts and port in PORTS.values()


# ---- names


@cache
def resolver():
    """Threads of its own: a name that takes its time holds up no engine's."""
    return ThreadPool(8)


def look_up(host, port):
    """The addresses of a host, as texts; none if it is unknown. Runs in a thread."""
    try:
        found = get_original("socket", "getaddrinfo")(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [entry[4][0] for entry in found]


def addresses_of(target):
    """The addresses that may be connected to. Raises InvalidRequest where one of them may not."""
    found = list(dict.fromkeys(resolver().apply(look_up, (target.host, target.port))))
    good = found and (
        target.named or all(is_public(address) and not is_own(address) for address in found)
    )
    if not good:  # in one sentence: which names there are inside is nobody's business
        raise bad(
            f"{target.host} has no public address, and images are fetched from public ones only"
        )
    return sorted(found, key=lambda address: ":" in address)[:TRIES]


# ---- one image


@cache
def trusted():
    """Whose certificates count: reading them takes its time."""
    return ssl.create_default_context()


class Line:
    """One connection to a checked address, in the place of http1.Pool."""

    def __init__(self, target, address):
        self.target, self.address = target, address

    def take(self):
        tls = trusted() if self.target.secure else None
        return Connection((self.address, self.target.port), self.target.host, tls)

    def give(self, connection):
        connection.close()


def ask(target):
    """The Answer to a GET. Raises InvalidRequest, Refusal."""
    bare = f"[{target.host}]" if ":" in target.host else target.host
    standard = target.port == PORTS["https" if target.secure else "http"]
    host = bare if standard else f"{bare}:{target.port}"
    request = f"GET {target.path} HTTP/1.1\r\nHost: {host}\r\n{HEADERS}".encode()
    for address in addresses_of(target):
        try:
            return Answer(Line(target, address), [request])
        except OSError as error:
            fault = error
    raise bad(f"{target.host} does not answer ({fault.__class__.__name__})") from None


def fetch(url, settings, hold=lambda size: None):
    """An image as the bytes of a data URL. `hold` is told of each size that it takes in memory. Raises Refusal."""
    slow = bad(f"an image has not come within {settings.image_timeout:g} seconds")
    try:
        with gevent.Timeout(settings.image_timeout, slow), live:
            return follow(url, settings, hold)
    except (
        UpstreamError,
        OSError,
        ValueError,
    ):  # http1 tells of an engine; a server of pictures is at fault
        raise bad("an image could not be fetched: its server's answer cannot be read") from None


def follow(url, settings, hold):
    """The image at the end of at most so many redirects."""
    for _ in range(REDIRECTS + 1):
        target = target_of(url, settings.image_urls)
        answer = ask(target)
        try:
            answer.head(LONG)
            if answer.status not in MOVED:
                return data_url(
                    take(answer, target.host, settings.max_image, hold), target.host, hold
                )
            url = urljoin(url, answer.headers.get("location", ""))
        finally:
            answer.close()
    raise bad(f"an image's address leads on more than {REDIRECTS} times")


def take(answer, host, most, hold):
    """The body of an answer, if it is an image and not too large."""
    if answer.status != 200:
        raise bad(f"{host} answers with status {answer.status}")
    if int_of(answer.headers.get("content-length")) > most:
        raise too_large(host, most)
    data = bytearray()
    while piece := answer.read(LONG):
        hold(len(piece))
        data += piece
        if len(data) >= ENOUGH:
            kind_of(data, host)
        if len(data) > most:
            raise too_large(host, most)
    if not answer.ended:
        raise bad(f"{host} broke off in the middle of an image")
    return data


def data_url(data, host, hold):
    text = b64encode(data)
    hold(len(text) - len(data))
    return b"data:image/%b;base64,%b" % (kind_of(data, host).encode(), text)


def kind_of(data, host):
    """png, jpeg, gif or webp, by the first bytes."""
    kind = next((kind for pattern, kind in KINDS if pattern.match(data)), None)
    if kind is None:
        raise bad(f"what {host} sends is no PNG, JPEG, GIF or WebP image")
    return kind


def int_of(text):
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else 0


def bad(problem):
    return InvalidRequest(problem + SEND_IT, "messages")


def too_large(host, most):
    return TooLarge(f"an image at {host} is over {most:,} bytes; send a smaller one", "messages")


# ---- all of a request


def fetch_all(urls, settings, hold=lambda size: None):
    """{url: data URL, as bytes} for all, at the same time, and each once. What fails ends the others. Raises Refusal."""
    if len(urls) > settings.max_images:
        raise InvalidRequest(
            f"there are {len(urls)} images to fetch, and at most {settings.max_images} are; "
            "send others as data URLs",
            "messages",
        )
    tasks = {gevent.spawn(attempt, url, settings, hold): url for url in dict.fromkeys(urls)}
    found = {}
    try:
        for task in gevent.iwait(list(tasks)):
            if not isinstance(task.value, bytes):
                raise task.value
            found[tasks[task]] = task.value
        hold(
            sum(len(found[url]) for url in urls) - sum(map(len, found.values()))
        )  # the engine gets each as often as named
    finally:
        gevent.killall(list(tasks), block=False)  # also when the client leaves
    return found


def attempt(url, settings, hold):
    """The image or the exception; one that leaves a greenlet would be printed."""
    try:
        return fetch(url, settings, hold)
    except Exception as error:
        return error
