"""What stands before the gateway: browsers, with pages of other origins, and nginx, with the block that sparks.example.toml gives."""
import re
import shutil
import subprocess
import time
from threading import Event

import pytest

from support import ROOT
from support.engine import Head, Wait, chat_chunks
from support.gateway import Gateway
from support.processes import answers, end, free_port, spawn, wait_until

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hello"}]}
PAGE, OTHER = "https://app.example.net", "https://other.example.net"
PREFLIGHT = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os"}
OPEN = ["/v1/models", "/v1/models/a/b", CHAT, CHAT + "/", "/v1/messages", "/v1/responses", "/v1/usage", "/v1/nothing", "/help"]
CLOSED = ["/metrics", "/healthz", "/console", "/llms.txt", "/", "/v1x", "/helpful", "/nothing"]


# ---- pages of other origins: the Fetch standard's CORS protocol

def started(pair, stock, folder, **settings):
    gateway = Gateway(folder, pair.engine.url, stock, **settings)
    try:
        yield gateway.wait_alive().wait_ready()
    finally:
        gateway.stop()
    gateway.check_log()


@pytest.fixture(scope="module")
def listed(shared_pair, stock, tmp_path_factory):
    yield from started(shared_pair, stock, tmp_path_factory.mktemp("cors"), cors_origins=f"{PAGE}, http://localhost:3000")


@pytest.fixture(scope="module")
def anybody(shared_pair, stock, tmp_path_factory):
    yield from started(shared_pair, stock, tmp_path_factory.mktemp("any"), cors_origins="*")


def cors(answer):
    """The headers of an answer that let a page read it, by the end of their names."""
    begin = "access-control-"
    return {name.removeprefix(begin): value for name, value in answer.headers.items() if name.startswith(begin)}


def names(value):
    return set(re.split(", *", value.lower()))


def preflight(gateway, path, origin=PAGE, **headers):
    return gateway.client(key=False).request("OPTIONS", path, headers={**PREFLIGHT, "Origin": origin, **headers})


@pytest.mark.parametrize("path", OPEN)
def test_preflight(shared, listed, path):
    answer = preflight(listed, path)
    assert answer.status == 204 and not {"transfer-encoding", "content-length"} & answer.headers.keys()     # RFC 9112, 6.1
    said = cors(answer)
    assert said["allow-origin"] == PAGE and names(answer.headers["vary"]) >= {"origin"}
    assert {"get", "post"} <= names(said["allow-methods"]) and said["allow-headers"] == "authorization,content-type,x-stainless-os"
    assert 0 < int(said["max-age"]) <= 3600 and "allow-credentials" not in said
    assert shared.engine.requests == []


def test_connection_goes_on_after_a_preflight(listed):
    with listed.client().open() as connection:
        for _ in range(2):
            assert connection.request("OPTIONS", CHAT, headers=PREFLIGHT).read_all() == b""
            assert connection.post(CHAT, ASK, {"Origin": PAGE}).json()["choices"]


@pytest.mark.parametrize("path", CLOSED)
def test_never_for_what_is_not_for_scripts(listed, anybody, path):
    for gateway in (listed, anybody):
        for answer in (preflight(gateway, path), gateway.client().get(path, {"Origin": PAGE})):
            assert cors(answer) == {} and "origin" not in answer.headers.get("vary", "").lower()


@pytest.mark.parametrize("origin", [OTHER, PAGE + ".evil.example", PAGE + ":8443", "http://app.example.net", "null", "", "https://a, " + PAGE,
                                    PAGE + "/", "http://localhost", "http://localhost:30000"])
def test_pages_that_are_not_listed(listed, origin):
    for answer in (preflight(listed, CHAT, origin), listed.client().get("/v1/models", {"Origin": origin})):
        assert answer.status in (200, 204) and cors(answer) == {} and names(answer.headers["vary"]) >= {"origin"}


@pytest.mark.parametrize("asked", [None, "", "x\u00e9", "a b", "a,,b", "<b>", "a:b"])
def test_odd_names_of_headers_are_not_repeated(listed, asked):
    answer = preflight(listed, CHAT, **{"Access-Control-Request-Headers": asked})
    assert answer.status == 204 and "allow-headers" not in cors(answer)


READABLE = {"x-request-id", "retry-after", *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset")
                                             for unit in ("requests", "tokens"))}
ANSWERS = [
    ("GET", "/v1/models", None, 200), ("GET", "/help", None, 200), ("GET", "/v1/nothing", None, 404), ("PUT", CHAT, None, 405),
    ("POST", CHAT, ASK, 200), ("POST", CHAT, {**ASK, "stream": True}, 200), ("POST", CHAT, b"{", 400), ("POST", CHAT, {**ASK, "model": "no"}, 404),
    ("POST", "/v1/messages", {**ASK, "max_tokens": 9, "stream": True}, 200), ("POST", "/v1/messages", b"{", 400),
    ("POST", "/v1/messages/count_tokens", ASK, 200), ("POST", "/v1/responses", {"input": "a"}, 200), ("POST", "/v1/embeddings", {"input": "a"}, 400),
]


@pytest.mark.parametrize("method, path, body, status", ANSWERS, ids=str)
def test_a_page_reads_every_answer(shared, listed, anybody, method, path, body, status):
    for gateway, origin in ((listed, PAGE), (anybody, "*")):
        answer = gateway.client().request(method, path, body, {"Origin": PAGE})
        said = cors(answer)
        assert answer.status == status and said.pop("allow-origin") == origin
        assert names(said.pop("expose-headers")) >= READABLE and said == {}
        assert "origin" in names(answer.headers["vary"]) and answer.read_all()
        if path.startswith("/v1"):
            answer = gateway.client(key=False).request(method, path, body, {"Origin": PAGE})
            assert answer.status in (401, 404, 405) and cors(answer)["allow-origin"] == origin


def test_headers_of_limits_are_among_those_that_are_read(listed):
    assert listed.keys("limit", "tester", "--rpm", "1", "--tpm", "1").returncode == 0
    try:
        sent = [listed.client().post(CHAT, ASK, {"Origin": PAGE}) for _ in range(2)]
        assert sent[1].status == 429 and sent[1].headers["retry-after"]
        found = {name for answer in sent for name in answer.headers if name.startswith("x-") or "request-id" in name}
        assert found <= names(cors(sent[1])["expose-headers"])
    finally:
        listed.keys("limit", "tester", "--clear")


@pytest.mark.parametrize("path, status", [(CHAT, 204), ("/help", 204), ("/v1/models", 204), ("/v1/nothing", 404), ("/metrics", 204)])
def test_without_the_setting(shared, path, status):
    """No key is asked for, and nobody is let in."""
    for answer in (preflight(shared.gateway, path), shared.client().request("OPTIONS", path)):
        assert answer.status == status and cors(answer) == {} and "vary" not in answer.headers
        assert status == 404 or answer.headers["allow"]


def test_reload_changes_it(gateway, engine, tmp_path):
    front = gateway()
    config = front.settings["config"]
    for text, origin in ((f"cors_origins = ['{OTHER}/']", OTHER), ("cors_origins = '*'", "*"), ("", None)):
        config.write_text(text)
        assert subprocess.run([shutil.which("kill"), "-HUP", str(front.pid)], timeout=5).returncode == 0
        wait_until(lambda origin=origin: cors(preflight(front, CHAT, OTHER)).get("allow-origin") == origin, 5)


def test_a_preflight_comes_through_the_edge_as_all_else(gateway, engine):
    """The proxy adds its secret to it."""
    front = gateway(cors_origins=PAGE, edge_secret="s3cret")
    assert preflight(front, CHAT).status == 403
    assert preflight(front, CHAT, **{"X-Sparks-Edge": "s3cret"}).status == 204


# ---- /metrics and a proxy

FORWARDED = ["X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "Forwarded", "X-Real-IP", "CF-Connecting-IP", "Via", "True-Client-IP"]


@pytest.mark.parametrize("settings, secret, status", [
    ({}, None, 200), ({}, "s3cret", 200),
    ({"base_url": "https://sparks.example.net"}, None, 401),
    ({"edge_secret": "s3cret"}, None, 401), ({"edge_secret": "s3cret"}, "wrong", 401), ({"edge_secret": "s3cret"}, "s3cret", 200),
    ({"edge_secret": "s3cret", "base_url": "https://sparks.example.net"}, "s3cret", 200),
], ids=str)
def test_metrics_from_this_machine(gateway, engine, settings, secret, status):
    front = gateway(**settings)
    edge = {"X-Sparks-Edge": secret}
    stranger = front.client(key=False)
    assert stranger.get("/metrics", edge).status == status
    for header in FORWARDED:                                        # a proxy adds the secret to everybody's requests
        assert stranger.get("/metrics", {**edge, header: "203.0.113.9"}).status == 401
    if status == 401:
        admin = front.keys("add", "boss", "--admin").stdout.strip()
        assert front.client().get("/metrics", edge).status == 403 and front.client(admin).get("/metrics", edge).status == 200


# ---- nginx

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
    scgi_temp_path {folder}/s;
    server {{
        listen {address};
        {block}
    }}
}}
"""


def documented():
    """The block for nginx as sparks.example.toml gives it."""
    text = (ROOT / "sparks.example.toml").read_text(encoding="utf-8")
    block, = re.findall(r"^# +location / \{\n(?:# .*\n)*?# +\}\n", text, re.M)
    return re.sub("^#", "", block, flags=re.M)


@pytest.fixture(scope="module")
def proxied(shared_pair, stock, tmp_path_factory):
    """(a client's way through nginx, the gateway behind it)."""
    if not NGINX:
        pytest.skip("nginx is not installed")
    folder = tmp_path_factory.mktemp("nginx")
    front = started(shared_pair, stock, folder, edge_secret="the-same-secret")
    gateway = next(front)
    address = f"127.0.0.1:{free_port()}"
    block = documented()
    assert block.count("127.0.0.1:8080") == 1
    block = block.replace("127.0.0.1:8080", gateway.settings["bind"])
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, address=address, block=block))
    process = spawn([NGINX, "-p", str(folder), "-e", f"{folder}/error.log", "-c", f"{folder}/nginx.conf"], folder / "nginx.log", None)
    try:
        wait_until(lambda: answers(f"http://{address}/healthz"), 10, process, "nginx")
        direct, gateway.url = gateway.url, f"http://{address}"
        yield gateway, direct
    finally:
        end(process)
        next(front, None)


def test_nginx_passes_everything_on(shared, proxied):
    gateway, direct = proxied
    assert gateway.client().post(CHAT, ASK).json()["choices"]
    assert gateway.client(key=False).get("/v1/models").status == 401
    assert gateway.url in gateway.client(key=False).get("/help?format=json").read_all().decode()    # the port is in it
    large = {"messages": [{"role": "user", "content": "a" * (3 << 20)}]}
    assert gateway.client().post(CHAT, large).status == 200
    gateway.url, through = direct, gateway.url
    try:
        assert gateway.client().get("/v1/models").status == 403      # not past nginx
    finally:
        gateway.url = through


def test_nginx_holds_no_event_back(shared, proxied):
    go, chunks = Event(), chat_chunks("a b c")
    shared.engine.play(Head(), *chunks[:2], Wait(go), *chunks[2:])
    answer = proxied[0].client(timeout=10).post(CHAT, {**ASK, "stream": True})
    first = next(answer.events())
    began = time.monotonic()
    go.set()
    assert first.data and answer.read_all().endswith(b"data: [DONE]\n\n") and time.monotonic() - began < 15


def test_metrics_are_not_public_behind_nginx(shared, proxied):
    gateway, _ = proxied
    for spoofed in ({}, {"X-Forwarded-For": ""}, {"X-Forwarded-For": "127.0.0.1"}, {"X-Sparks-Edge": "the-same-secret"}):
        assert gateway.client(key=False).get("/metrics", spoofed).status == 401
        assert gateway.client().get("/metrics", spoofed).status == 403
    admin = gateway.keys("add", "boss", "--admin").stdout.strip()
    assert b"sparks_active" in gateway.client(admin).get("/metrics").read_all()
