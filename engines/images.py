"""Images by address: the gateway fetches them, so that no request reaches into the network that
the engine stands in.

Only http and https, and only public addresses, unless the setting `image_urls` names a host. A name
is looked up once, every address that it has is judged, and the connection goes to one of these, so
that a name which changes meanwhile gains nothing. TLS is verified against the name. Each redirect
is judged anew. What comes is bounded in bytes and in time, is never unpacked, and is an image by
its first bytes, whatever its headers say.

Source: OWASP's advice on server-side request forgery; the IANA registries of special-purpose
addresses (RFC 6890).
"""

import http.client
import io
import logging
import re
import ssl
from base64 import b64encode
from functools import cache, partial
from ipaddress import IPv4Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import gevent
from gevent import socket
from gevent.monkey import get_original
from gevent.threadpool import ThreadPool
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

from errors import InvalidRequest, TooLarge
from loop import Shares, take_turn

PORTS = {"http": 80, "https": 443}
REDIRECTS = 3
MOVED = (301, 302, 303, 307, 308)
TRIES = 3  # addresses of a name
CONNECT_TIMEOUT = 10  # seconds for one of them
LONGEST = 8192  # characters of an address
LONGEST_HOST = 253  # of a host (RFC 1035, 2.3.4)
READ = 65536  # bytes a read
ENCODE = 3 << 14  # bytes encoded in one go, without padding between them
PART = 1 << 20  # bytes of each part of a data URL but the last one
MAX_HEAD = 65536  # bytes, interim heads included
FRAMED = 6  # bytes on the wire for a byte of an image at most: each may be a chunk of its own
ENOUGH = 16  # bytes that tell what it is
SAFE = "/:=&?~#+!$,;'@()*[]%"  # stay as they are in a path
HEADERS = {
    "User-Agent": "sparks-gateway",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
FORMATS = [
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
]
SEND_IT = "; send the image itself, as a data URL (data:image/png;base64,...)"

# It would log a hostile server's headers, with the address and a traceback.
logging.getLogger("urllib3").setLevel(logging.CRITICAL)


# The owner is a Call's account. A look-up can't be ended: it keeps its thread, and its share, for
# as long as the system's resolver takes, which with a silent name server is half a minute.
fetches = Shares(each=16, most=256, spare=1)
look_ups = Shares(each=4, most=64, spare=1)
MOST_THREADS = 1000  # for look-ups: a thread is made when it is needed


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
    ip_network("0.0.0.0/8"),  # this host
    ip_network("100.64.0.0/10"),  # carriers' NAT
    ip_network("168.63.129.16/32"),  # Azure's own services, at every machine there
    ip_network("192.0.0.0/24"),  # protocol assignments
    ip_network("192.88.99.0/24"),  # 6to4 relays
    ip_network("198.18.0.0/15"),  # benchmarks
    ip_network("240.0.0.0/4"),  # reserved
    ip_network("2001::/23"),  # Teredo and relatives
    ip_network("2001:db8::/32"),  # documentation
    ip_network("2002::/16"),  # 6to4
    ip_network("3fff::/20"),  # documentation
]
UNICAST = ip_network("2000::/3")  # all of IPv6 that is handed out
NAT64 = ip_network("64:ff9b::/96")


def is_public(text):
    """Whether an address (a text) is one of the public internet; if it wraps another, whether that
    is."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if address.version == 6:
        if address.ipv4_mapped or address in NAT64:
            return is_public(str(IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.scope_id or address not in UNICAST:
            return False
    if any(address in network for network in CLOSED):  # one of the other version never is
        return False
    return address.is_global and not address.is_multicast


def is_own(text):
    """Whether an address is this machine's own: what it sends there, it sends from there. (Nothing
    is sent.)"""
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((text, 9))
            return sock.getsockname()[0] == text
        except OSError:
            return False


def target_of(url, hosts):
    """The Target of a URL. `hosts` is the setting image_urls. Raises InvalidRequest where it leads
    somewhere it must not."""
    check_length(url)
    try:
        parts = urlsplit(url)
        host = in_ascii(parts.hostname or "")
        port = parts.port
    except ValueError:
        raise bad("an image's address cannot be read") from None
    if port is None:
        port = PORTS.get(parts.scheme)
    if parts.scheme not in PORTS or not url.isprintable() or "\\" in parts.netloc:
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
    path = quote(parts.path or "/", SAFE)
    if parts.query:
        path += f"?{quote(parts.query, SAFE)}"
    return Target(parts.scheme == "https", host, port, path, named)


def check_length(url):
    """Before anything else is done with an address: reading one may take longer than it is long."""
    if len(url) > LONGEST:
        raise bad(f"an image's address has over {LONGEST:,} characters")


def in_ascii(host):
    """A host as the system's resolver takes it. Raises ValueError."""
    if len(host) > LONGEST_HOST + 1:  # with a dot at its end
        raise ValueError("too long for a host, and encoding it would take a while")
    if host.isascii():
        return host
    return host.encode("idna").decode()


def is_host(host):
    """Whether a host is a name, or an address in its usual form. Others (2130706433, 0x7f.1,
    017700000001) are there to deceive."""
    try:
        return ip_address(host).version in (4, 6) and "%" not in host
    except ValueError:
        last = host.rpartition(".")[2]
        return (
            len(host) <= LONGEST_HOST
            and bool(re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", host))
            and not re.fullmatch(r"[0-9]+|0x[0-9a-f]*", last)
        )


def is_named(host, port, hosts):
    host = in_url(host)
    return f"{host}:{port}" in hosts or host in hosts and port in PORTS.values()


def in_url(host):
    """A host as a URL writes it."""
    return f"[{host}]" if ":" in host else host


# ---- names


@cache
def resolver():
    """Threads of its own: gevent's are few, and everybody's."""
    return ThreadPool(MOST_THREADS, idle_task_timeout=60)


def look_up(host, port):
    """The addresses of a host, as texts; none if it is unknown. Runs in a thread."""
    try:
        found = get_original("socket", "getaddrinfo")(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [entry[4][0] for entry in found]


def look_up_for(owner, target):
    """The addresses of a target's host. Ended early, the thread goes on and keeps the owner's share
    for so long."""
    look_ups.acquire(owner)
    try:
        found = resolver().spawn(look_up, target.host, target.port)
    except BaseException:
        look_ups.release(owner)
        raise
    found.rawlink(lambda _: look_ups.release(owner))
    return found.get()


def addresses_of(target, owner):
    """The addresses that may be connected to. Raises InvalidRequest where one of them may not."""
    found = list(dict.fromkeys(look_up_for(owner, target)))
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
    """Whose certificates count: the system's, as with engines. Reading them takes its time, which
    is a thread's."""
    return gevent.get_hub().threadpool.apply(ssl.create_default_context)


class Metered(io.RawIOBase):
    """The bytes of a connection, of which at most `left` more may come.

    Whoever reads them gives way by the time of all who do: bytes that wait in the kernel already
    let nobody else run, and those of tiny chunks cost a thousand times what they weigh.
    """

    def __init__(self, raw, left):
        self.raw = raw
        self.left = left

    def readable(self):
        return True

    def readinto(self, buffer):
        size = self.raw.readinto(buffer)
        take_turn()  # before what is done with them
        self.left -= size
        if self.left < 0:
            raise ValueError("a server sent too much")
        return size

    def close(self):
        self.raw.close()
        super().close()


class Response(http.client.HTTPResponse):
    """An answer whose head, framing and body are bounded, and whose interim heads (RFC 9110 15.2)
    are passed over."""

    def __init__(self, sock, *args, most, **options):
        """`most`: bytes of an image."""
        super().__init__(sock, *args, **options)
        self.most = most
        self.metered = Metered(self.fp.detach(), MAX_HEAD)
        self.fp = io.BufferedReader(self.metered)

    def begin(self):
        super().begin()
        while 100 <= self.status < 200:
            self.headers = self.msg = None
            super().begin()
        self.metered.left = MAX_HEAD + FRAMED * self.most


def connect(target, address, most):
    """A connection to an address that was judged; TLS is for the host's name. Raises OSError,
    HTTPError."""
    if target.secure:
        connection = HTTPSConnection(
            address,
            target.port,
            timeout=CONNECT_TIMEOUT,
            ssl_context=trusted(),
            server_hostname=target.host,
        )
    else:
        connection = HTTPConnection(address, target.port, timeout=CONNECT_TIMEOUT)
    connection.response_class = partial(Response, most=most)
    try:
        connection.connect()
    except BaseException:
        connection.close()
        raise
    connection.timeout = None  # of what follows, the whole has its time
    return connection


def connect_to_any(target, owner, most):
    """A connection to the first of a target's addresses that answers. Raises InvalidRequest."""
    for address in addresses_of(target, owner):
        try:
            return connect(target, address, most)
        except (OSError, HTTPError) as error:
            fault = type(error.__cause__ or error).__name__  # urllib3 wraps the system's
    raise bad(f"{target.host} does not answer ({fault})")


def ask(connection, target):
    """The answer to a GET, its body still to come."""
    host = in_url(target.host)
    if target.port != PORTS["https" if target.secure else "http"]:
        host = f"{host}:{target.port}"
    connection.request(
        "GET",
        target.path,
        headers={"Host": host, **HEADERS},
        preload_content=False,
        decode_content=False,
    )
    return connection.getresponse()


def fetch(url, settings, owner=None, hold=lambda size: None):
    """An image as a data URL, a list of bytes. Raises Refusal.

    owner  the id of the key for which it is fetched
    hold   is told of each size that it takes in memory
    """
    slow = bad(f"an image has not come within {settings.image_timeout:g} seconds")
    try:
        with gevent.Timeout(settings.image_timeout, slow), fetches.one(owner):
            return follow(url, settings, owner, hold)
    except (HTTPError, http.client.HTTPException, OSError, ValueError):
        raise bad("an image could not be fetched: its server's answer cannot be read") from None


def follow(url, settings, owner, hold):
    """The image at the end of at most so many redirects."""
    most = settings.max_image
    for _ in range(REDIRECTS + 1):
        target = target_of(url, settings.image_urls)
        connection = connect_to_any(target, owner, most)
        answer = None
        try:
            answer = ask(connection, target)
            if answer.status not in MOVED:
                return take(answer, target.host, most, hold)
            where = answer.headers.get("location", "")
            check_length(where)
            url = urljoin(url, where)
        finally:
            if answer:
                answer.close()
            connection.close()
    raise bad(f"an image's address leads on more than {REDIRECTS} times")


def take(answer, host, most, hold):
    """The body of an answer as a data URL, if it is an image and not too large."""
    if answer.status != 200:
        raise bad(f"{host} answers with status {answer.status}")
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        raise ValueError("compressed, though it was asked not to")
    if int_of(answer.headers.get("content-length")) > most:
        raise too_large(host, most)
    url = DataUrl(host, hold)
    size = 0
    while piece := read(answer, host):
        size += len(piece)
        if size > most:
            raise too_large(host, most)
        url.add(piece)
    return url.end()


class DataUrl:
    """A data URL that is made as its image comes: bytes that many have to wait for are not gone
    over in one go.

    rest     bytes of the image that are still to be encoded
    encoded  what is encoded, and will be a part of the URL
    parts    the parts that are ready
    kind     png, jpeg, gif or webp, or None while too little has come
    """

    def __init__(self, host, hold):
        self.host = host
        self.hold = hold
        self.rest = bytearray()
        self.encoded = []
        self.size = 0  # of what is encoded
        self.parts = []
        self.kind = None

    def add(self, piece):
        self.rest += piece
        if self.kind is None and len(self.rest) >= ENOUGH:
            self.begin()
        if len(self.rest) >= ENCODE:
            self.encode(len(self.rest) // 3 * 3)  # all but the end is without padding
            if self.size >= PART:
                self.join()

    def end(self):
        """The URL, a list of bytes."""
        if self.kind is None:
            self.begin()
        self.encode(len(self.rest))
        self.join()
        return self.parts

    def begin(self):
        self.kind = format_of(self.rest, self.host)
        self.encoded = [b"data:image/%b;base64," % self.kind.encode()]

    def encode(self, size):
        text = b64encode(self.rest[:size])
        del self.rest[:size]
        self.hold(len(text))
        self.encoded.append(text)
        self.size += len(text)

    def join(self):
        take_turn()
        self.parts.append(b"".join(self.encoded))
        self.encoded = []
        self.size = 0


def read(answer, host):
    """Some more of an image; b"" at its end."""
    try:
        return answer.read1(READ)
    except HTTPError:
        raise bad(f"{host} broke off in the middle of an image") from None


def format_of(data, host):
    """png, jpeg, gif or webp, by the first bytes. Raises InvalidRequest for anything else."""
    for pattern, name in FORMATS:
        if pattern.match(data):
            return name
    raise bad(f"what {host} sends is no PNG, JPEG, GIF or WebP image")


def int_of(text):
    if text and text.isascii() and text.isdigit() and len(text) < 20:
        return int(text)
    return 0


def bad(problem):
    return InvalidRequest(problem + SEND_IT, "messages")


def too_large(host, most):
    return TooLarge(f"an image at {host} is over {most:,} bytes; send a smaller one", "messages")


# ---- all of a request


def fetch_all(urls, settings, owner=None, hold=lambda size: None):
    """{url: data URL, a list of bytes} of all, fetched at the same time, and each once. One that
    fails ends the others. Raises Refusal. See `fetch`.

    Those in a history, which come again with every request, are left out where they fail, or where
    there are too many: the last ones are fetched then.
    """
    needed = [url for url in urls if type(url) is str]
    if len(needed) > settings.max_images:
        raise InvalidRequest(
            f"there are {len(needed)} images to fetch, and at most {settings.max_images} are; "
            "send others as data URLs",
            "messages",
        )
    wanted = list(dict.fromkeys([*needed, *reversed(urls)]))[: settings.max_images]
    tasks = {gevent.spawn(attempt, str(url), settings, owner, hold): url for url in wanted}
    found = {}
    try:
        for task in gevent.iwait(list(tasks)):
            url = tasks[task]
            if isinstance(task.value, list):
                found[url] = task.value
            elif url in needed or not isinstance(task.value, (InvalidRequest, TooLarge)):
                raise task.value
        # The engine gets each as often as it is named.
        sizes = {url: sum(map(len, parts)) for url, parts in found.items()}
        hold(sum(sizes[url] for url in urls if url in found) - sum(sizes.values()))
    finally:
        gevent.killall(list(tasks), block=False)  # also when the client leaves
    return found


def attempt(url, settings, owner, hold):
    """The image or the exception; one that leaves a greenlet would be printed."""
    try:
        return fetch(url, settings, owner, hold)
    except Exception as error:
        return error
