"""Requests, and the load generator that sends them. Bounded in count and time."""

import json
import time

from . import machine

IMAGE = "iVBORw0KGgoAAAANSUhEUgAA"  # base64, of which a PNG begins
SENTENCE = "The spark jumped the gap, and for a moment the room was \"bright\".\n"
FORMS = {  # a chat in the form of another API, with its reasoning
    "/v1/messages": lambda chat: {**chat, "thinking": {"type": "adaptive"}},
    "/v1/responses": lambda chat: {
        "model": chat["model"],
        "stream": True,
        "input": "hi",
        "max_output_tokens": chat["max_tokens"],
    },
}
HARD_END = 120  # seconds for a run, whatever the load generator says


class Requests:
    """Files with whole HTTP requests, made when they are first asked for."""

    def __init__(self, folder):
        self.folder, self.known = folder, {}

    def file(self, target, model="fake", tokens=200, stream=False, size=0, kind="image", path=None):
        """A chat request; `size` is that of its message in bytes, an image as a data URL or text.

        Streams do not ask for usage: the gateway does, and has to take it off.
        """
        wanted = (target.key, path or target.path, model, tokens, stream, size, kind)
        if wanted not in self.known:
            body = {
                "model": model,
                "max_tokens": tokens,
                **({"stream": True} if stream else {}),
                "messages": [{"role": "user", "content": content(size, kind)}],
            }
            body = FORMS.get(path, dict)(body)
            self.known[wanted] = self.folder / f"{len(self.known)}.request"
            self.known[wanted].write_bytes(
                whole(target.key, path or target.path, json.dumps(body).encode())
            )
        return self.known[wanted]


def content(size, kind):
    if not size:
        return "hi"
    if kind == "text":
        return (SENTENCE * (size // len(SENTENCE) + 1))[:size]
    url = "data:image/png;base64," + IMAGE * (size // len(IMAGE))
    return [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]


def whole(key, path, body):
    head = (
        f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nAccept: */*\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Load:
    """A run of the load generator against a target; `options` are its flags.

    `result()` waits for its end.
    """

    def __init__(self, stage, target, request, **options):
        flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self.process = stage.start(
            [stage.loadgen, "127.0.0.1", target.port, request, *flags], pipe=True
        )
        self.begun = time.monotonic()

    def cpu_at(self, seconds, pids):
        """(the moment, seconds of CPU that `pids` have used), so many seconds after the start."""
        time.sleep(max(0, self.begun + seconds - time.monotonic()))
        return time.monotonic(), machine.cpu(pids)

    def result(self):
        """What the load generator printed, as a dict; see loadgen.c.

        `bad`: how many answers were not whole.
        """
        out, _ = self.process.communicate(timeout=HARD_END)
        found = json.loads(out)
        found["bad"] = sum(found[name] for name in ("errors", "refused", "unfinished", "cut"))
        return found
