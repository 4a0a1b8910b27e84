"""Images by address: where a request may lead the gateway and where not, hostile servers, what reaches the engine and what is
measured of it."""
import base64
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from types import SimpleNamespace

import gevent
import gevent.socket
import gevent.ssl
import pytest

import call
from counting import measure
from dialects import chat, completions, embeddings, messages
from dialects.messages import count
from dialects.responses import Responses
from engines import images
from errors import InvalidRequest, Refusal, TooLarge
from front.large_json import LONG
from loop import Shares
from support.dialect_tables import Fleet
from support.engine import Close, Dribble, Engine, Hang, Head, Raw
from support.gateway import started
from support.observe import gauge, idle
from support.processes import wait_until
from support.rows import row_of
from support.runs import LONGEST

PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==")
JPEG, GIF, WEBP = b"\xff\xd8\xff\xe0" + bytes(20), b"GIF89a" + bytes(20), b"RIFF\x00\x00\x00\x00WEBPVP8 " + bytes(8)
PUBLIC = "93.184.216.34"
CHAT = "/v1/chat/completions"


def settings(hosts="public", **given):
    return SimpleNamespace(**{"image_urls": hosts.split(","), "max_images": 16, "max_image": 1 << 20, "image_timeout": 2,
                              **given})


def url_of(data, kind="png"):
    return f"data:image/{kind};base64,".encode() + base64.b64encode(data)


# ---- which addresses are public

LOCAL = {
    "loopback": ["127.0.0.1", "127.1.2.3", "127.255.255.255", "::1"],
    "this host": ["0.0.0.0", "0.1.2.3", "::"],
    "private": ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1"],
    "shared": ["100.64.0.1", "100.127.255.255"],
    "link-local": ["169.254.0.1", "fe80::1", "fe80::1%eth0", "febf::1"],
    "metadata": ["169.254.169.254", "fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "169.254.170.2"],
    "unique local": ["fc00::1", "fd12:3456::1"], "site-local": ["fec0::1"],
    "multicast": ["224.0.0.1", "239.255.255.255", "ff02::1", "ff0e::1"], "broadcast": ["255.255.255.255"],
    "reserved": ["240.0.0.1", "192.0.0.8", "192.88.99.1", "198.18.0.1", "5f00::1", "100::1", "4000::1", "::8.8.8.8"],
    "documentation": ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"],
    "mapped": ["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "0:0:0:0:0:ffff:7f00:1"],
    "NAT64": ["64:ff9b::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b::10.0.0.1", "64:ff9b:1::8.8.8.8"],
    "6to4": ["2002:7f00:1::", "2002:a9fe:a9fe::1", "2002:808:808::"], "Teredo": ["2001::1", "2001:0:7f00:1::"],
    "no address": ["", "a", "1", "127.1", "0x7f000001", "2130706433", "1.2.3.4.5", "127.0.0.1 ", "[::1]"],
}


@pytest.mark.parametrize("kind", LOCAL)
def test_addresses_that_are_not_public(kind):
    assert [address for address in LOCAL[kind] if images.is_public(address)] == []


@pytest.mark.parametrize("address", [PUBLIC, "1.1.1.1", "8.8.8.8", "172.32.0.1", "100.63.255.255", "169.253.0.1",
                                     "223.255.255.255",
                                     "2606:4700::1111", "2a00:1450:4001::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_addresses_that_are(address):
    assert images.is_public(address)


def test_own_addresses():
    """Whatever this machine is called by outside."""
    assert images.is_own("127.0.0.1") and not images.is_own("192.0.2.1")


# ---- where a URL leads

@pytest.mark.parametrize("url, target", [
    ("http://example.org/a.png", (False, "example.org", 80, "/a.png")), ("HTTPS://Example.ORG.", (True, "example.org", 443, "/")),
    ("https://example.org:443/a?b=c&d=%20#e", (True, "example.org", 443, "/a?b=c&d=%20")),
    ("http://example.org:443/", (False, "example.org", 443, "/")), ("http://1.1.1.1/", (False, "1.1.1.1", 80, "/")),
    ("http://[2606:4700::1111]/a", (False, "2606:4700::1111", 80, "/a")),
    ("https://bücher.example/ü b/日.png", (True, "xn--bcher-kva.example", 443, "/%C3%BC%20b/%E6%97%A5.png")),
    ("http://a_b.example-c.org/", (False, "a_b.example-c.org", 80, "/")),
    ("http://example.org/a\"<>{}|\\^`", (False, "example.org", 80, "/a%22%3C%3E%7B%7D%7C%5C%5E%60")),
])
def test_targets(url, target):
    assert images.target_of(url, ["public"]) == (*target, False)


ODD_HOSTS = ["2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001", "127.1", "127.0.1", "127.0.0.0x1", "00127.0.0.1",
             "1.2.3.4.5", "256.1.1.1", "0", "a..b", ".", "..", "a%00b", "[fe80::1%25eth0]", "[::1", "[v1.x]", "①②⑦.⓪.⓪.①.", "a b",
             "a'b",
             "xn--a.0x", "", "-" * 300]


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_hosts_that_are_none(host):
    with pytest.raises(InvalidRequest):
        target = images.target_of(f"http://{host}/a.png", ["public"])
        assert not images.is_public(target.host)    # ①②⑦: it means what it looks like
        raise InvalidRequest("not public")


@pytest.mark.parametrize("url, words", [
    ("ftp://example.org/a", "plain http"), ("file:///etc/passwd", "plain http"), ("//example.org/", "plain http"),
    ("", "plain http"),
    ("http://user@example.org/", "user"), ("http://user:secret@example.org/", "user"), ("http://example.org@127.0.0.1/", "user"),
    ("http://@example.org/", "user"), ("http://example.org\\@127.0.0.1/", "plain http"),
    ("http://127.0.0.1\\.example.org/", "plain http"),
    ("http://example.org:0/", "ports"), ("http://example.org:22/", "ports"), ("http://example.org:8080/", "ports"),
    ("https://example.org:6379/", "ports"), ("http://example.org:99999/", "read"), ("http://example.org:x/", "read"),
    ("http://example.org/\r\nHost: a", "plain http"), ("http://exam\tple.org/", "plain http"),
    ("http://example.org/" + "a" * 9000, "over 8,192 characters"), ("http://" + "é." * 120 + "a/" + "a" * 8000, "over 8,192"),
    ("http://" + "é." * 130 + "a/", "read"), ("HTTP://" + "a." * 130 + "a/", "read"), ("http://" + "a." * 126 + "ab/", "no host"),
    ("http://example.org/\ue000mark:0\ue000", "plain http"), ("http:///a", "no host"), ("http://?a", "no host"),
])
def test_urls_that_lead_nowhere(url, words):
    with pytest.raises(InvalidRequest) as caught:
        images.target_of(url, ["public"])
    assert words in caught.value.message and caught.value.param == "messages" and "data URL" in caught.value.message


@pytest.mark.parametrize("hosts, url, allowed", [
    (["public"], "http://example.org/", True), ([], "http://example.org/", False), (["a.lan"], "http://example.org/", False),
    (["a.lan"], "http://a.lan/", True), (["a.lan"], "https://A.LAN/", True), (["a.lan"], "http://a.lan:9000/", False),
    (["a.lan:9000"], "http://a.lan:9000/", True), (["a.lan:9000"], "http://a.lan/", False),
    (["public", "10.0.0.5:9000"], "http://10.0.0.5:9000/", True), (["[::1]:90"], "http://[::1]:90/", True),
    (["a.lan"], "http://b.a.lan/", False), (["a.lan"], "http://a.lan.b/", False),
])
def test_hosts_of_the_settings(hosts, url, allowed):
    try:
        target = images.target_of(url, hosts)
    except InvalidRequest:
        assert not allowed
    else:
        assert allowed and target.named == (hosts != ["public"])


# ---- fetching; names are looked up in NAMES

NAMES = {}


@pytest.fixture(autouse=True)
def names(monkeypatch):
    """No name is looked up in earnest. What NAMES says may be a list, or a list of lists: one for each look-up."""
    NAMES.clear()
    asked = []

    def look_up(host, port):
        asked.append(host)
        found = NAMES.get(host, [host] if images.is_host(host) and host[-1].isdigit() or ":" in host else [])
        return found.pop(0) if found and isinstance(found[0], list) else found

    monkeypatch.setattr(images, "look_up", look_up)
    return asked


@pytest.fixture(autouse=True)
def patched(monkeypatch):
    """What gevent's monkey does for urllib3 in the gateway. This process has none."""
    monkeypatch.setattr("urllib3.util.connection.socket", gevent.socket)


@pytest.fixture
def connected(monkeypatch):
    """Nothing is connected to: the addresses that would have been."""
    made = []

    def connect(target, address, most):
        made.append(((address, target.port), target.host, target.secure))
        raise ConnectionRefusedError

    monkeypatch.setattr(images, "connect", connect)
    return made


def refused(url, *hosts, kind=InvalidRequest, **given):
    with pytest.raises(Refusal) as caught:
        images.fetch(url, settings(",".join(hosts) or "public", **given))
    assert isinstance(caught.value, kind) and caught.value.param in ("messages", None), caught.value
    return caught.value.message


def literal(address):
    return f"[{address}]" if ":" in address else address


@pytest.mark.parametrize("kind", [kind for kind in LOCAL if kind != "no address"])
def test_local_addresses_are_never_connected_to(connected, kind):
    for address in LOCAL[kind]:
        NAMES["inside.example.org"] = [address]
        NAMES["mixed.example.org"] = [PUBLIC, address]
        for url in (f"http://{literal(address)}/", f"https://{literal(address)}:443/a.png", "http://inside.example.org/",
                    "https://mixed.example.org/a"):
            said = refused(url)
            assert "public" in said or "%" in address
            assert address not in said.replace(literal(address), "", 1) or "example" not in url     # no word of what is inside
    assert connected == []


@pytest.mark.parametrize("host", ODD_HOSTS)
def test_odd_forms_of_local_addresses(connected, host):
    refused(f"http://{host}/")
    assert connected == []


def test_the_machines_own_address(connected, monkeypatch):
    monkeypatch.setattr(images, "is_own", lambda address: address == PUBLIC)
    assert "public" in refused(f"http://{PUBLIC}/") and connected == []


def test_a_name_that_changes(connected, names):
    """It is looked up once, and what was judged is what is connected to."""
    NAMES["rebind.example.org"] = [[PUBLIC], ["127.0.0.1"], ["127.0.0.1"]]
    assert "does not answer" in refused("http://rebind.example.org/")
    assert connected == [((PUBLIC, 80), "rebind.example.org", False)] and names == ["rebind.example.org"]


def test_tls_is_for_the_name(connected):
    NAMES["example.org"] = [PUBLIC, PUBLIC, "2606:4700::1111", "1.1.1.1", "1.0.0.1"]
    refused("https://example.org/")
    assert connected == [((address, 443), "example.org", True) for address in (PUBLIC, "1.1.1.1", "1.0.0.1")]


def test_an_unknown_name(connected):
    assert "no public address" in refused("http://nothing.example.org/") and connected == []


def test_a_look_up_does_not_hold_up_the_loop(connected, monkeypatch):
    """It takes until the loop has turned ten times, which it could not if it had to wait."""
    turned, waited = threading.Event(), []
    monkeypatch.setattr(images, "look_up", lambda host, port: waited.append(turned.wait(30)) or [])

    def turn():
        for _ in range(10):
            gevent.sleep(0.01)
        turned.set()
    clock = gevent.spawn(turn)
    assert "no public address" in refused("http://slow.example.org/", image_timeout=60)
    assert waited == [True]
    clock.kill()


def test_a_look_up_ends_with_the_time_for_images(connected, monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(images, "look_up", lambda host, port: done.wait(30) and [])
    begun = time.monotonic()
    assert "within 0.3 seconds" in refused("http://slow.example.org/", image_timeout=0.3)
    assert time.monotonic() - begun < 20
    done.set()


@pytest.fixture
def silent(names, monkeypatch):
    """A resolver that says nothing about names of slow.example.org until this is set."""
    answers, quick = threading.Event(), images.look_up
    monkeypatch.setattr(images, "look_up", lambda host, port: answers.wait(20) and [] if "slow" in host else quick(host, port))
    yield answers
    answers.set()


def test_slow_names_of_one_key_hold_up_no_other(server, silent):
    """A look-up can't be ended: its thread is its key's until the resolver has answered, or has given up."""
    url, short = play(server, *sends(PNG)), settings(f"public,{server.host}", image_timeout=0.3)
    slow = [gevent.spawn(images.attempt, f"http://{n}.slow.example.org/", short, "ann", len) for n in range(200)]
    gevent.joinall(slow)
    assert all("within 0.3 seconds" in task.value.message for task in slow)
    begun = time.monotonic()
    assert images.fetch(url, settings(server.host), "bob") == [url_of(PNG)] and time.monotonic() - begun < 3
    with pytest.raises(InvalidRequest, match="within 0.3 seconds"):
        images.fetch(url, short, "ann")
    silent.set()
    assert images.fetch(url, settings(server.host), "ann") == [url_of(PNG)]


def until(true, seconds=10):
    """As wait_until, while greenlets go on."""
    with gevent.Timeout(seconds):
        while not true():
            gevent.sleep(0.01)


def test_slow_names_of_everybody_hold_up_no_other(server, silent):
    """Nor do those of sixteen keys, with which all shares are taken: there is one beside them for each."""
    url, keys = play(server, *sends(PNG)), range(16)
    slow = [gevent.spawn(images.attempt, f"http://{n}.slow.example.org/", settings(image_timeout=20), key, len) for key in keys for n in range(6)]
    until(images.look_ups.all.locked)
    assert threading.active_count() < 64 + 20
    assert images.fetch(url, settings(server.host), "bob") == [url_of(PNG)]
    silent.set()
    gevent.joinall(slow)
    assert all("no public address" in task.value.message for task in slow)


def test_slow_servers_of_one_key_hold_up_no_other(server, monkeypatch):
    """Nor do those of several, with which all shares are taken. A key's own wait for each other."""
    shares = Shares(each=2, most=4, spare=1)
    monkeypatch.setattr(images, "fetches", shares)
    slow = [gevent.spawn(images.attempt, play(server, Hang(), path=f"/{n}.png"), settings(server.host, image_timeout=20), key, len)
            for key in ("ann", "amy", "abe") for n in range(9)]
    until(lambda: server.connections == 5)
    assert shares.all.locked()                      # abe's one is beside the four
    urls = [play(server, *sends(PNG), path=f"/quick{n}.png") for n in range(5)]
    assert images.fetch_all(urls, settings(server.host), "bob") == dict.fromkeys(urls, [url_of(PNG)])
    gevent.killall(slow)
    assert images.fetch(urls[0], settings(server.host), "ann") == [url_of(PNG)] and not shares.all.locked()
    assert not (shares.users or shares.owned or shares.spares)      # nothing is kept of who is gone: people come and go


# ---- servers

@pytest.fixture(scope="module")
def serving():
    with Engine() as server, Engine() as other:
        yield server, other


@pytest.fixture
def server(serving):
    for one in serving:
        one.reset()
        one.connections = 0
    one = serving[0]
    one.host = f"pictures.test:{one.port}"
    NAMES["pictures.test"] = ["127.0.0.1"]
    yield one
    assert not one.faults


def play(server, *steps, path="/a.png"):
    server.on(path, steps)
    return f"http://{server.host}{path}"


def sends(data, type="image/png", **headers):
    return Head(framing=len(data), type=type, headers=headers), data


@pytest.mark.parametrize("data, kind", [(PNG, "png"), (JPEG, "jpeg"), (GIF, "gif"), (WEBP, "webp")])
@pytest.mark.parametrize("type", ["image/png", "text/html", "", "application/octet-stream"])
def test_an_image_is_one_by_its_first_bytes(server, data, kind, type):
    assert images.fetch(play(server, *sends(data, type)), settings(server.host)) == [url_of(data, kind)]
    request = server.probes[-1]
    assert (request.method, request.header("host"), request.header("accept-encoding")) == ("GET", server.host, "identity")
    assert not {"authorization", "cookie", "referer"} & {name.lower() for name, _ in request.headers}


@pytest.mark.parametrize("data", [b"", b"<html>secret</html>", b'{"secret": 1}', b"\x89PNG", b"root:x:0:0:root:/root:/bin/bash\n",
                                  b"<svg/>" * 9,
                                  b"RIFF\x00\x00\x00\x00WAVE" + bytes(20), b" " + PNG], ids=lambda data: repr(data[:9]))
def test_what_is_no_image(server, data):
    said = refused(play(server, *sends(data)), server.host)
    assert "no PNG, JPEG, GIF or WebP" in said and "secret" not in said


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_image_in_pieces(server, size):
    for head in (Head(framing="chunked"), Head(framing="close"), Head(framing=len(PNG))):
        url = play(server, head, Dribble(PNG, size), *([Close()] if head.framing == "close" else []))
        assert images.fetch(url, settings(server.host)) == [url_of(PNG)]


@pytest.mark.parametrize("status", [204, 400, 401, 404, 500, 304])
def test_other_answers(server, status):
    assert f"status {status}" in refused(play(server, Head(status, framing=0)), server.host)


HOSTILE = {                                         # what a server does -> (its steps, what becomes of it)
    "endless": ([Head(), *[PNG + bytes(1 << 16)] * 1000, Hang()], TooLarge),
    "endless words": ([Head(), *[b"secret" * 9999] * 1000, Hang()], InvalidRequest),
    "a large length": ([Head(framing=1 << 40), PNG, Hang()], TooLarge),
    "a length that is a lie": ([Head(framing=9999), PNG, Close()], InvalidRequest),
    "chunks without an end": ([Head(), PNG, Close()], InvalidRequest),
    "drips": ([Head(), Dribble(PNG * 99, 1, 0.02)], InvalidRequest),
    "dripping head": ([Dribble(Head(framing=5).bytes(SimpleNamespace(like="vllm")), 1, 0.05)], InvalidRequest),
    "silence": ([Hang()], InvalidRequest),
    "silence after the head": ([Head(), Hang()], InvalidRequest),
    "a head that does not end": ([Raw(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30_000), Hang()], InvalidRequest),
    "quick drips": ([Head(), PNG, Raw(b"1\r\n\0\r\n" * 1_000_000), Hang()], InvalidRequest),
    "trailers for ever": ([Head(), PNG, Raw(b"0\r\n" + b"a: b\r\n" * 3_000_000), Hang()], InvalidRequest),
    "chunks with long words": ([Head(), Raw((b"1;" + b"a" * 9000 + b"\r\n\x89\r\n") * 9999), Hang()], InvalidRequest),
    "interim heads for ever": ([Raw(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 9999), Hang()], InvalidRequest),
    "no HTTP": ([Raw(b"220 mail.example.org ESMTP\r\n\r\n"), Hang()], InvalidRequest),
    "gzip": ([*sends(b"\x1f\x8b" + bytes(50), **{"Content-Encoding": "gzip"})], InvalidRequest),
    "broken chunks": ([Head(), Raw(b"zz\r\n\r\n"), Hang()], InvalidRequest),
    "closes at once": ([Close()], InvalidRequest),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_servers_are_bounded(server, name):
    steps, kind = HOSTILE[name]
    held, begun = [], time.monotonic()
    with pytest.raises(kind):
        images.fetch(play(server, *steps), settings(server.host, image_timeout=0.6), hold=held.append)
    assert time.monotonic() - begun < 5 and sum(held) <= (1 << 20) * 4 / 3 + (1 << 17)
    wait_until(lambda: not server.threads, 5)        # nothing stays connected


@pytest.mark.parametrize("where", ["/" + "é." * 20_000, "http://" + "é." * 20_000 + "a/", "../" * 15_000], ids=lambda where: where[:9])
def test_redirects_to_an_address_that_is_too_long(server, where):
    where = where.encode().decode("latin-1")
    url = play(server, Head(302, {"Location": where}, framing=0))
    assert "over 8,192 characters" in refused(url, server.host) and server.connections == 1


def longest_run(work):
    """What `work` returns or raises, and the longest time of CPU (in seconds) for which nobody else came to run."""
    runs = [0.0]

    def watch():
        while True:
            last = time.thread_time()
            gevent.sleep(0.001)
            runs.append(time.thread_time() - last)

    watching = gevent.spawn(watch)
    gevent.sleep(0.01)
    try:
        return work(), max(runs)
    except Refusal as refusal:
        return refusal, max(runs)
    finally:
        watching.kill()


@pytest.mark.parametrize("name", ["quick drips", "trailers for ever", "chunks with long words", "endless"])
def test_hostile_servers_hold_nobody_up(server, name):
    steps, kind = HOSTILE[name]
    url = play(server, *steps)
    refusal, longest = longest_run(lambda: images.fetch(url, settings(server.host, max_image=20 << 20, image_timeout=0.6)))
    assert isinstance(refusal, kind) or kind is TooLarge and isinstance(refusal, InvalidRequest)
    assert longest < 0.6 * LONGEST


def test_large_images_hold_nobody_up(server):
    """Sixteen of 20 MB that come at once. Theirs are the shortest runs, not each one's."""
    data = PNG + bytes((20 << 20) - len(PNG))
    urls, held = [play(server, *sends(data), path=f"/{n}") for n in range(16)], []
    found, longest = longest_run(lambda: images.fetch_all(urls, settings(server.host, max_image=20 << 20, image_timeout=60),
                                                          hold=held.append))
    assert len(found) == 16 and longest < 0.6 * LONGEST        # 30 ms
    assert all(b"".join(url) == url_of(data) for url in list(found.values())[:2])
    assert sum(held) == sum(len(part) for url in found.values() for part in url) - 16 * len(b"data:image/png;base64,")
    body = [part for url in found.values() for part in (b'{"url":"', *url, b'"}')]
    (length, count, _), longest = longest_run(lambda: measure(body))
    assert count == 16 and length.size < 200 and longest < 0.6 * LONGEST       # they are no text, and not gone over


@pytest.mark.parametrize("extra", range(-2, 3))
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_an_image_in_parts(server, parts, extra):
    """However its length falls."""
    data = PNG + bytes(parts * images.PART // 4 * 3 - len(PNG) + extra)
    url = images.fetch(play(server, *sends(data)), settings(server.host, max_image=20 << 20))
    assert b"".join(url) == url_of(data) and len(url) in (parts, parts + 1)
    assert all(len(part) < 2 * images.PART for part in url)


def test_interim_heads(server):
    head = Raw(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n")
    assert images.fetch(play(server, head, *sends(PNG)), settings(server.host)) == [url_of(PNG)]


def test_an_image_in_the_smallest_chunks(server):
    """Six bytes on the wire for each of its own, and still an image of the size that is allowed."""
    data = PNG + bytes(30_000)
    url = play(server, Head(), Raw(b"".join(b"1\r\n%c\r\n" % byte for byte in data) + b"0\r\n\r\n"), Close())
    assert images.fetch(url, settings(server.host, max_image=len(data))) == [url_of(data)]


def test_the_log_does_not_name_addresses(server, caplog):
    """urllib3 would, where a server's head is odd."""
    url = play(server, Head(framing=len(PNG), headers={"A b": "c", " d": "e"}), PNG)
    images.attempt(url, settings(server.host), None, len)
    assert not caplog.records


def test_more_than_the_length_says(server):
    assert images.fetch(play(server, Head(framing=len(PNG)), PNG + b"more"), settings(server.host)) == [url_of(PNG)]


def test_nobody_listens():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        assert "does not answer" in refused(f"http://{address}/", address)


# ---- redirects

@pytest.mark.parametrize("status", images.MOVED)
def test_redirects(server, status):
    play(server, *sends(PNG), path="/b.png")
    url = play(server, Head(status, {"Location": "/b.png?x=1#y"}, framing=0))
    assert images.fetch(url, settings(server.host)) == [url_of(PNG)]


@pytest.mark.parametrize("where", ["http://127.0.0.1:{port}/", "http://localhost:{port}/", "http://inside.example.org/",
                                   "http://[::1]/",
                                   "http://169.254.169.254/latest/meta-data/", "//127.0.0.1:{port}/", "http://127.1:{port}/",
                                   "file:///etc/passwd",
                                   "http://2130706433:{port}/", "ftp://127.0.0.1/", "gopher://127.0.0.1:6379/_x",
                                   "http://user@pictures.test/",
                                   "http://[::1", "http://pictures.test:x/"])
def test_redirects_are_judged_anew(server, serving, where):
    other = serving[1]
    NAMES["inside.example.org"] = NAMES["localhost"] = ["127.0.0.1"]
    url = play(server, Head(302, {"Location": where.format(port=other.port)}, framing=0))
    refused(url, "public", server.host)
    assert other.connections == 0 and server.connections == 1


def test_redirects_in_a_circle(server):
    assert "more than 3 times" in refused(play(server, Head(302, {"Location": "/a.png"}, framing=0)), server.host)
    assert server.connections == 4


# ---- TLS

@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("a certificate is made with the openssl command, which this machine does not have")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
                    "2",
                    "-keyout", folder / "key", "-out", folder / "cert", "-subj", "/CN=pictures.test", "-addext",
                    "subjectAltName=DNS:pictures.test"], check=True, capture_output=True, timeout=60)
    return folder


def serve_tls(certificate, listener, seen):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert", certificate / "key")
    context.sni_callback = lambda sock, name, _: seen.append(name)
    try:
        with context.wrap_socket(listener.accept()[0], server_side=True) as sock:
            sock.recv(65536)
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(PNG) + PNG)
    except OSError:                                 # the client thinks no good of it
        pass


@pytest.mark.parametrize("host, trusts, good", [("pictures.test", True, True), ("pictures.test", False, False),
                                                ("other.test", True, False), ("127.0.0.1", True, False)])
def test_tls_is_verified_against_the_name(certificate, monkeypatch, host, trusts, good):
    """The connection goes to the address that was judged; the name goes along, and the certificate must be its."""
    NAMES["pictures.test"] = NAMES["other.test"] = ["127.0.0.1"]
    context, seen = gevent.ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), []
    if trusts:
        context.load_verify_locations(certificate / "cert")
    monkeypatch.setattr(images, "trusted", lambda: context)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5)
        thread = threading.Thread(target=serve_tls, args=(certificate, listener, seen))
        thread.start()
        address = f"{host}:{listener.getsockname()[1]}"
        if good:
            assert images.fetch(f"https://{address}/", settings(address)) == [url_of(PNG)]
        else:
            assert "does not answer" in refused(f"https://{address}/", address)
        thread.join(5)
    assert seen == [None if host == "127.0.0.1" else host]


# ---- all of a request

def test_all_at_once(server):
    """Eight images that take half a second each; the same address is fetched once."""
    urls = [play(server, Head(framing=len(PNG)), Dribble(PNG, 10, 0.05), path=f"/{n}.png") for n in range(8)]
    begun = time.monotonic()
    found = images.fetch_all([*urls, *urls], settings(server.host, image_timeout=5))
    assert found == dict.fromkeys(urls, [url_of(PNG)]) and time.monotonic() - begun < 3.5 and server.connections == 8


def test_too_many(server, connected):
    with pytest.raises(InvalidRequest, match="17 images to fetch, and at most 16"):
        images.fetch_all([f"http://{server.host}/{n}" for n in range(17)], settings(server.host))
    assert connected == []


def test_one_address_many_times(server):
    """It is fetched once, but the engine would get it as often as it is named."""
    url, held = play(server, *sends(PNG)), []
    assert images.fetch_all([url] * 5, settings(server.host), hold=held.append) == {url: [url_of(PNG)]}
    assert server.connections == 1 and held[-1] == 4 * len(url_of(PNG))
    with pytest.raises(InvalidRequest, match="17 images to fetch"):
        images.fetch_all([url] * 17, settings(server.host))


def test_the_first_that_fails_ends_the_others(server):
    urls = [play(server, Hang(), path="/slow.png"), play(server, Head(404, framing=0), path="/none.png")]
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match="status 404"):
        images.fetch_all(urls, settings(server.host))
    gevent.sleep(0.05)
    assert time.monotonic() - begun < 4
    wait_until(lambda: not server.threads, 2)


def test_whoever_waits_for_them_leaves(server):
    url = play(server, Hang())
    waits = gevent.spawn(images.fetch_all, [url], settings(server.host))
    while not server.threads:
        gevent.sleep(0.02)
    waits.kill()
    gevent.sleep(0.02)
    wait_until(lambda: not server.threads, 1)


# ---- through the gateway

PATCH = """
from engines import images
from gevent.monkey import get_original
def look_up(host, port):
    if host == "slow.test":
        get_original("time", "sleep")(3)
    return {"pictures.test": ["127.0.0.1"], "inside.test": ["10.1.2.3"]}.get(host, [host])
images.look_up = look_up
"""


@pytest.fixture(scope="module")
def house(stock, tmp_path_factory, serving):
    with Engine() as engine:
        hosts = f"public, pictures.test:{serving[0].port}"
        with started(engine, tmp_path_factory.mktemp("images"), stock, PATCH, image_urls=hosts, max_images=3, max_image="1 MB",
                     image_timeout=2, max_body="4 MB", max_bodies="8 MB") as gateway:
            gateway.engine = engine
            yield gateway


@pytest.fixture
def gate(house, server):
    house.engine.reset()
    yield house
    idle(house)


def part(url):
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def ask(gate, *urls, text="look", **fields):
    content = [{"type": "text", "text": text}, *map(part, urls)]
    return gate.client().post(CHAT, {"messages": [{"role": "user", "content": content}], **fields}, {"x-request-id": "image"})


def urls_sent(engine):
    return [one["image_url"]["url"].encode() for one in engine.requests[-1].json()["messages"][0]["content"][1:]]


@pytest.mark.parametrize("streams", [True, False])
def test_what_reaches_the_engine(gate, server, streams):
    urls = [play(server, *sends(PNG)), "data:image/gif;base64,AAAA", play(server, *sends(JPEG), path="/b.jpg")]
    assert ask(gate, *urls, stream=streams).read_all()
    assert urls_sent(gate.engine) == [url_of(PNG), b"data:image/gif;base64,AAAA", url_of(JPEG, "jpeg")]
    assert gate.engine.requests[-1].json()["messages"][0]["content"][1]["image_url"]["detail"] == "low"
    assert server.host not in gate.log


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path, body", [
    ("/v1/messages", lambda url: {"max_tokens": 9, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": url}}]}]}),
    ("/v1/responses", lambda url: {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}),
])
def test_images_of_every_api(gate, server, path, body, streams):
    client = gate.client()
    assert client.post(path, {**body(play(server, *sends(PNG))), "stream": streams}).read_all()
    assert url_of(PNG) in gate.engine.requests[-1].body
    for url in ("http://127.0.0.1/", "file:///etc/passwd", "ftp://example.org/a.png"):
        answer = client.post(path, {**body(url), "stream": streams})
        assert answer.status == 400 and "data URL" in answer.json()["error"]["message"]
    assert len(gate.engine.requests) == 1


def earlier(path, *urls):
    """A conversation that began with these images."""
    if path == "/v1/messages":
        content = [{"type": "image", "source": {"type": "url", "url": url}} for url in urls]
    elif path == "/v1/responses":
        content = [{"type": "input_image", "image_url": url} for url in urls]
    else:
        content = [*map(part, urls)]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "And?"}]
    return {"max_tokens": 99, "input" if path == "/v1/responses" else "messages": turns}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("path, place", [(CHAT, "messages[0].content[{}]"), ("/v1/messages", "messages.0.content.{}"),
                                         ("/v1/responses", "input[0].content[{}]")])
def test_an_image_that_was_once_there_ends_no_session(gate, server, path, place, streams):
    """Its address came again with every turn; so did those of more images than are fetched: the last ones are."""
    play(server, Head(404, framing=0), path="/gone.png")
    good = [play(server, *sends(PNG), path=f"/{n}.png") for n in range(4)]
    for urls, left_out in (([good[0], f"http://{server.host}/gone.png", "http://inside.test/"], [1, 2]), (good, [0])):
        answer = gate.client().post(path, {**earlier(path, *urls), "stream": streams})
        assert answer.status == 200 and answer.read_all()
        assert answer.headers["x-sparks-ignored"] == ", ".join(f"{place.format(at)} image" for at in left_out)
        first = gate.engine.requests[-1].json()["messages"][0]["content"]
        assert [at for at, one in enumerate(first) if one == {"type": "text", "text": "[image: it could not be fetched]"}] == left_out
        assert sum(one["type"] == "image_url" and one["image_url"]["url"].encode() == url_of(PNG) for one in first) == len(urls) - len(left_out)


def test_images_of_a_large_body(gate, server):
    """Beside long strings that are never parsed."""
    url, data = play(server, *sends(PNG)), "data:image/png;base64," + "A" * (3 << 20)
    assert ask(gate, url, data, text="x" * (2 * LONG)).status == 200
    assert urls_sent(gate.engine) == [url_of(PNG), data.encode()]


def test_an_address_as_long_as_a_book(gate, server):
    answer = ask(gate, f"http://{server.host}/" + "a" * (2 * LONG), "data:image/png;base64," + "A" * (3 << 20))
    assert answer.status == 400 and gate.engine.requests == [] and server.connections == 0


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("url, status, words", [
    ("http://127.0.0.1/", 400, "no public address"), ("http://[::ffff:127.0.0.1]/", 400, "no public address"),
    ("http://inside.test/", 400, "inside.test has no public address"), ("http://0x7f.1/", 400, "no host"),
    ("http://pictures.test:22/", 400, "ports 80 and 443"), ("http://user@pictures.test/", 400, "user"),
    ("{host}/none.png", 400, "status 404"), ("{host}/large.png", 413, "over 1,048,576 bytes"),
    ("{host}/slow.png", 400, "within 2 seconds"),
])
def test_refusals(gate, server, url, status, words, streams):
    play(server, Head(404, framing=0), path="/none.png")
    play(server, Head(framing=2 << 20), Hang(), path="/large.png")
    play(server, Head(), Hang(), path="/slow.png")
    answer = ask(gate, url.format(host=f"http://{server.host}"), stream=streams)
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["type"]) == (status, "messages",
                                                              "invalid_request_error") and words in error["message"]
    assert gate.engine.requests == []


def test_too_many_and_too_much(gate, server):
    urls = [play(server, *sends(PNG + bytes(900_000)), path=f"/{n}.png") for n in range(4)]
    answer = ask(gate, *urls)
    assert (answer.status, answer.json()["error"]["code"]) == (400, "invalid_request")
    answer = ask(gate, *urls[:3], text="x" * 3_000_000)
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")
    answer = ask(gate, *urls[:1] * 3, text="x" * 1_000_000)
    assert (answer.status, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert gate.engine.requests == []
    for _ in range(5):                              # what was held is let go of
        assert ask(gate, *urls[:2]).status == 200


def test_nothing_is_fetched_for_a_key_that_is_over_its_limit(gate, server):
    key = gate.add_key("ann")
    assert gate.keys("limit", "ann", "--rpm", "1").returncode == 0
    url, client = play(server, *sends(PNG)), gate.client(key)
    body = {"messages": [{"role": "user", "content": [part(url)]}]}
    assert [client.post(CHAT, body).status for _ in range(3)] == [200, 429, 429] and server.connections == 1


def test_a_key_fetches_inside_its_limits(gate, server):
    """Its requests count from before their images are fetched, take no slot meanwhile, hold up no other key, and count no
    more once they are refused for their images."""
    key = gate.add_key("amy")
    assert gate.keys("limit", "amy", "--rpm", "2", "--active", "1").returncode == 0
    slow = [part(play(server, Head(), PNG, Hang(), path=f"/slow{n}.png")) for n in range(3)]
    url, client = play(server, *sends(PNG)), gate.client(key)
    waiting = [client.open() for _ in range(12)]
    for number, connection in enumerate(waiting):
        connection.start("POST", CHAT, {"messages": [{"role": "user", "content": slow}], "stream": number % 2 == 0})
    wait_until(lambda: len(server.threads) == 6, 5, what="two requests' images")
    begun = time.monotonic()
    assert gauge(gate, "sparks_active") == 0
    assert ask(gate, url).status == 200 and time.monotonic() - begun < 1.5
    assert sorted(connection.answer().status for connection in waiting) == [400] * 2 + [429] * 10
    assert server.connections == 7
    for connection in waiting:
        connection.close()
    body = {"messages": [{"role": "user", "content": [part(url)]}]}
    assert [client.post(CHAT, body).status for _ in range(3)] == [200, 200, 429]


def test_the_gateway_ends_while_images_are_fetched(gateway, engine, server):
    """They have as long as what runs; what is still to be fetched then ends with an error."""
    NAMES.clear()
    front = gateway(image_urls=f"127.0.0.1:{server.port}", image_timeout=20, drain=0.3)
    play(server, Head(), PNG, Hang())
    with front.client().open() as connection:
        connection.start("POST", CHAT, {"messages": [{"role": "user", "content": [part(f"http://127.0.0.1:{server.port}/a.png")]}]},
                         {"x-request-id": "draining"})
        wait_until(lambda: server.threads, 5)
        front.stop()
        assert connection.answer().status == 503
    assert row_of(front.db, "draining")["error"] == "shutting_down"


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("leave", ["close", "reset"])
def test_the_client_leaves_while_they_are_fetched(gate, server, leave, streams):
    url = play(server, Head(), PNG, Hang())
    connection, ident = gate.client().open(), f"leaves-{leave}-{streams}"
    connection.start("POST", CHAT, {"messages": [{"role": "user", "content": [part(url)]}], "stream": streams},
                     {"x-request-id": ident})
    wait_until(lambda: server.threads, 5)
    getattr(connection, leave)()
    wait_until(lambda: not server.threads, 1)
    row = row_of(gate.db, ident)
    assert (row["status"], row["aborted"], row["queued_ms"]) == (499, 1, None)
    assert gate.engine.requests == [] and gauge(gate, "sparks_active") == 0


def test_others_go_on_meanwhile(gate, server):
    url = play(server, Head(), PNG, Hang())
    with gate.client().open() as connection:
        connection.start("POST", CHAT, {"messages": [{"role": "user", "content": [part(url)]}]})
        wait_until(lambda: server.threads, 5)
        begun = time.monotonic()
        assert ask(gate).status == 200 and time.monotonic() - begun < 4


def test_slow_names_hold_up_no_other_key(gate, server):
    """Twelve look-ups at once, each of three seconds."""
    url, client = play(server, *sends(PNG)), gate.client(gate.add_key("bob"))
    slow = [part(f"http://slow.test/{n}.png") for n in range(3)]
    waiting = [gate.client().open() for _ in range(4)]
    for connection in waiting:
        connection.start("POST", CHAT, {"messages": [{"role": "user", "content": slow}]})
    time.sleep(0.3)
    begun = time.monotonic()
    assert client.post(CHAT, {"messages": [{"role": "user", "content": [part(url)]}]}).status == 200
    assert time.monotonic() - begun < 2.5
    for connection in waiting:
        assert connection.answer().status == 400
        connection.close()


def test_turned_off(gateway, engine, server):
    front = gateway(image_urls="off")
    answer = ask(front, f"http://{server.host}/a.png")
    assert answer.status == 400 and "not fetched here" in answer.json()["error"]["message"]
    assert "address is refused" in " ".join(front.client().get("/help").read_all().decode().split())


def test_a_redirect_through_the_gateway(gate, server, serving):
    url = play(server, Head(302, {"Location": f"http://127.0.0.1:{serving[1].port}/"}, framing=0))
    assert ask(gate, url).status == 400 and serving[1].connections == 0 and gate.engine.requests == []


# ---- what is measured of a request

def measured(ask, heavy=8000):
    gateway = SimpleNamespace(secret=b"k" * 32, settings=SimpleNamespace(heavy_prompt=heavy))
    return call.Call.measure(SimpleNamespace(gateway=gateway), ask)


SAID = {"role": "user", "content": "x" * 40_000}
ROUTES = {
    "chat": (chat, {"messages": [SAID]}), "messages": (messages, {"max_tokens": 9, "messages": [SAID]}),
    "responses": (Responses(lambda: 0, lambda: "00"), {"input": [SAID]}), "completions": (completions, {"prompt": SAID["content"]}),
    "embeddings": (embeddings, {"model": "known", "input": SAID["content"]}), "count": (count, {"messages": [SAID]}),
}


@pytest.mark.parametrize("route", ROUTES)
def test_what_stays_in_no_cache_is_not_hashed(route):
    """The rest is, plain or streamed, under one name for all routes of a model."""
    dialect, body = ROUTES[route]
    for fields in ({}, {"stream": True}) if route not in ("embeddings", "count") else ({},):
        asked = dialect.read(json.dumps({**body, **fields}).encode(), Fleet(purpose="embedding" if dialect is embeddings else "chat"))
        found = measured(asked)
        assert measured(asked, heavy=0) == found._replace(hashes=())            # where no prompt is heavy
        assert found.length.size > 40_000 and len(found.hashes) == (0 if route in ("embeddings", "count") else 2)


@pytest.mark.parametrize("past", [False, True], ids=["asked", "earlier"])
def test_an_image_that_is_fetched_weighs_what_its_data_do(past):
    """Before it comes, and afterwards; wherever it is from, and once the conversation has gone on."""
    def asked(url):
        parts = [{"type": "text", "text": "x" * 20_000}, {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "y" * 20_000}]
        more = [{"role": "assistant", "content": "z" * 20_000}, {"role": "user", "content": "And so?"}] if past else []
        return chat.read(json.dumps({"messages": [{"role": "user", "content": parts}, *more]}).encode(), Fleet())

    url = "http://images.example/a.png"
    fetched = asked(url)
    before = measured(fetched)
    fetched.fill_in({url: [url_of(PNG)[:30], url_of(PNG)[30:]]})
    assert before == measured(fetched) == measured(asked(url_of(PNG).decode()))
    assert (before.images, len(before.hashes)) == (1, 3 if past else 2)
