"""Whether anything of a stream is lost.

What the gateway gives is held, byte for byte, beside what the pure stream object makes of the
engine's bytes. A request with a `seed` gets the same bytes from the engine each time, so it is
asked twice: directly and through the gateway. Streams are short, of many lengths, many at once,
mostly as fast as they go (events come in clumps, cut anywhere), every eighth paced (events come
alone); every third client asks for usage.
"""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from threading import local

from stream import ChatStream

AT_ONCE = 32
mine = local()  # connections of a thread


def request(number, paced):
    tokens = 1 + number // 8 % 4 if number % 8 == 0 else 1 + number % 60
    body = {
        "model": "fake@50" if paced else "fake",
        "stream": True,
        "seed": number + 1,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hi"}],
    }
    if asks_for_usage(number):
        body["stream_options"] = {"include_usage": True}
    return body


def is_paced(number):
    return number % 8 == 0


def asks_for_usage(number):
    return number % 3 == 0


def fetch(target, body):
    """The bytes of an answer, without the chunks around them."""
    connections = mine.__dict__.setdefault("connections", {})
    if target.port not in connections:
        connections[target.port] = http.client.HTTPConnection("127.0.0.1", target.port, timeout=30)
    connection = connections[target.port]
    connection.request(
        "POST", target.path, json.dumps(body), {"Authorization": f"Bearer {target.key}"}
    )
    answer = connection.getresponse()
    data = answer.read()
    return data if answer.status == 200 else b"%d " % answer.status + data


def expected(engine, number):
    """What the client should get."""
    body = {**request(number, False), "stream_options": {"include_usage": True}}
    name = request(number, is_paced(number))["model"]  # which the gateway writes into every chunk
    stream = ChatStream(usage=asks_for_usage(number), model=name)
    return stream.feed(fetch(engine, body)) + stream.end()


def differs(engine, gateway, number):
    """None, or the number and what was got and expected."""
    try:
        wanted, got = expected(engine, number), fetch(gateway, request(number, is_paced(number)))
    except (OSError, http.client.HTTPException) as error:
        return number, repr(error).encode(), b""
    return None if got == wanted else (number, got, wanted)


def check(engine, gateway, count):
    """`count` streams: {"streams", "different", "first"}.

    first: the first that differs, as text, or None.
    """
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = [
            one
            for one in pool.map(lambda number: differs(engine, gateway, number), range(count))
            if one
        ]
    first = "stream {}: got {!r}, expected {!r}".format(*found[0])[:2000] if found else None
    return {"streams": count, "different": len(found), "first": first}
