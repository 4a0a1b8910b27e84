"""A small engine behind real uvicorn, as vLLM is: what it does with connections is uvicorn's own.

    python asgi_engine.py PORT KEEP_ALIVE_SECONDS
"""
import asyncio
import json
import sys

MODEL = "asgi"
HEAD = {"id": "chatcmpl-1", "created": 1, "model": MODEL}


async def app(scope, receive, send):
    if scope["type"] != "http":                     # it starts or ends
        return
    body = b""
    while (message := await receive()).get("more_body") or message["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    path = scope["path"]
    if path == "/health":
        await answer(send, 200, b"")
    elif path == "/v1/models":
        await answer(send, 200, dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "vllm", "max_model_len": 4096}]}))
    elif path != "/v1/chat/completions" or scope["method"] != "POST":
        await answer(send, 404, dumps({"detail": "Not Found"}))
    elif json.loads(body).get("stream"):
        await stream(send)
    else:
        message = {"role": "assistant", "content": "Hello there"}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        await answer(send, 200, dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": usage()}))


async def answer(send, status, data):
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def stream(send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for delta, finish in ({"role": "assistant", "content": ""}, None), *(({"content": word}, None) for word in ("Hello", " there")), ({}, "stop"):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        await event(send, dumps({**HEAD, "object": "chat.completion.chunk", "choices": [choice]}))
        await asyncio.sleep(0.02)
    await event(send, dumps({**HEAD, "object": "chat.completion.chunk", "choices": [], "usage": usage()}))
    await event(send, b"[DONE]")
    await send({"type": "http.response.body", "body": b""})


async def event(send, data):
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def usage():
    return {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def dumps(value):
    return json.dumps(value).encode()


if __name__ == "__main__":
    import uvicorn

    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), timeout_keep_alive=int(sys.argv[2]), access_log=False, log_level="warning")
