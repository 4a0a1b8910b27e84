"""/help and /llms.txt: one page for people and agents, as Markdown, HTML or JSON.

It is made from the tables that the code uses. Pure: settings and models in, text out.

Source: the gateway's specification, which is this page for one model.
"""

import html
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import jinja2
from markdown_it import MarkdownIt
from markupsafe import Markup
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

import errors
import reasoning
from front.routes import NOT_SUPPORTED, ROUTES

NAME = "sparks-gateway"
FORMS = {"md": "text/markdown", "html": "text/html", "json": "application/json"}
ACCEPTED = {  # of types that a client likes equally, the first
    "text/markdown": "md",
    "application/json": "json",
    "text/html": "html",
    "text/plain": "md",
}
EXAMPLES = {  # a template file each, and its macros
    "examples": (
        "auth",
        "chat",
        "response",
        "stream",
        "events",
        "tools",
        "messages",
        "image",
        "models",
    ),
    "harnesses": (
        "python",
        "javascript",
        "pi",
        "pi_command",
        "opencode",
        "codex",
        "anthropic_python",
        "anthropic_javascript",
        "claude_code",
    ),
}
NO_MODEL = "MODEL-ID"  # stands in the examples while no model is known
ADDRESS = "http://address-of-this-gateway.invalid"  # stands for each client's own in what is kept
MOST_MODELS = 100  # that the page tells of
MOST_ACCEPT = 1000  # characters of an Accept header that are looked at

# What each refusal means and what to do about it; status and code stand in errors.py.
MEANINGS = {
    errors.InvalidRequest: (
        "Bad JSON, missing `messages`, bad `reasoning_effort`, or another field at fault (`param` "
        "names it); fix the request"
    ),
    errors.InvalidKey: "Key missing, wrong, or revoked; check the key, don't retry",
    errors.ModelNotAllowed: (
        "Your key may not use this model; `GET /v1/models` lists those that it may"
    ),
    errors.LimitExceeded: (
        "Your key's requests or tokens of this minute are used up, or its requests that are "
        "running may use the rest of its tokens; come back after `Retry-After`"
    ),
    errors.QuotaExceeded: (
        "Your key's tokens of the day or month are used up; the message says when it starts anew"
    ),
    errors.QueueFull: (
        "Many of your own requests are waiting already; let them end, and see `Retry-After`"
    ),
    errors.Forbidden: "Request did not come through the public edge; use the base URL above",
    errors.ModelNotFound: "Only the model ids above exist",
    errors.NotFound: "Only the endpoints above exist",
    errors.MethodNotAllowed: (
        "The endpoint exists, with another method; see the table of endpoints"
    ),
    errors.NoWebSocket: "No endpoint speaks WebSocket; send the same as a POST, with `stream`",
    errors.BodyTimeout: "The request stopped arriving, or came too slowly; send it again",
    errors.TooLarge: "Body over {max_body}; shrink embedded images",
    errors.UnsupportedEncoding: "Compressed body; send plain JSON without `Content-Encoding`",
    errors.InternalError: (
        "A fault of the gateway's own; tell the operator the response's `x-request-id`"
    ),
    errors.UpstreamError: (
        "The engine failed on this request, perhaps after it had worked on it, perhaps in "
        "mid-answer; retry once or twice"
    ),
    errors.EngineStuck: (
        "The engine has stopped working in the middle of this request; retry after `Retry-After`"
    ),
    errors.ModelUnavailable: (
        "The model is not loaded right now, and nothing was run; retry later (see `Retry-After`), "
        "do not hammer"
    ),
    errors.Overloaded: "Too much is in hand at this moment; retry after `Retry-After`",
    errors.Unready: "The gateway's own database cannot be read; retry after `Retry-After`",
    errors.ShuttingDown: "The gateway is restarting; retry after `Retry-After`",
    errors.UpstreamTimeout: "The engine was silent for too long; retry, or ask for less",
}


def form_of(accept, wanted=None):
    """The form to answer in: "md", "html" or "json".

    accept  the Accept header, or None
    wanted  the ?format= argument, which goes first
    """
    if wanted:
        form = wanted.lower()
        return form if form in FORMS else "md"
    # A charset or a level makes no difference here: only q= counts.
    types = re.sub(r";\s*(?!q\s*=)[^;,]*", "", (accept or "")[:MOST_ACCEPT], flags=re.I)
    offers = parse_accept_header(types, MIMEAccept)
    return ACCEPTED.get(offers.best_match(ACCEPTED), "md")


class Kept:
    """The page, rendered once for each state of settings and models: it costs more than a hundred
    other requests, and wants no key."""

    def __init__(self):
        """Nothing is rendered yet."""
        self.state = None
        self.found = {}

    def render(self, settings, models, base_url, form):
        """As the function of that name."""
        state = (list(vars(settings).values()), models)
        if state != self.state:
            self.state = state
            self.found = {}
        if form not in self.found:
            self.found[form] = render(settings, models, ADDRESS, form)
        body, mimetype = self.found[form]
        # Any client has one of its own, but it stands only where nothing is markup.
        address = api_address(base_url).removesuffix("/v1").encode("utf-8", "replace").decode()
        if form == "html":
            address = html.escape(address)
        return body.replace(ADDRESS, address), mimetype


def render(settings, models, base_url, form):
    """The page as (body, mimetype).

    models    engines.fleet.Model, perhaps none
    base_url  the public address, with or without /v1
    form      as form_of gives it
    """
    page = contents(settings, models, base_url)
    if form == "json":
        body = json.dumps(page, indent=2, ensure_ascii=False) + "\n"
    else:
        body = markdown(page)
        if form == "html":
            body = SCREEN.get_template("help.html").render(page=page, **as_html(body))
    # The name of an engine's model can hold a lone surrogate, which UTF-8 has no bytes for.
    return body.encode("utf-8", "replace").decode(), FORMS[form]


def markdown(page):
    return PAPER.get_template("help.md").render(
        page=page,
        groups=groups(page["models"]),
        no_model=NO_MODEL,
        unchanged=reasoning.UNCHANGED,
        invalid_key=errors.InvalidKey,
    )


# ---- what the page says: the JSON form, and what the Markdown form is made from


def contents(settings, models, base_url):
    """All that the page says, as a dict: its JSON form."""
    base_url = api_address(base_url)
    default = shown_model(models)
    slots = (default and default.slots) or settings.max_active
    page = {
        "name": NAME,
        "base_url": base_url,
        "anthropic_url": base_url.removesuffix("/v1"),
        "model": default and default.id,
        "models": [about(model) for model in models[:MOST_MODELS]],
        "description": settings.description,
        "slots": slots,
        "limits": limits(settings, slots),
        "privacy": (
            "prompts and completions are never stored. Per-key request counts, status, latency, "
            "and token counts are."
        ),
        "endpoints": [endpoint(route, base_url) for route in ROUTES],
        "not_supported": NOT_SUPPORTED,
        "images": images(settings),
        "auth": {
            "headers": ["Authorization: Bearer $SPARKS_API_KEY", "x-api-key: $SPARKS_API_KEY"],
            "key_format": "sk-sparks-<random>",
            "operator": settings.operator,
        },
        "reasoning": default and thinking(default),
        "errors": refusals(settings),
    }
    page |= {name: examples(name, page) for name in EXAMPLES}
    page["notes"] = notes(page)
    if len(models) > MOST_MODELS:
        page["notes"].append(f"`GET /v1/models` lists all {len(models)} models.")
    return page


def shown_model(models):
    """The model that the examples use: the default one, else the first for chats; None without."""
    for model in models:
        if model.default:
            return model
    for model in models:
        if model.purpose == "chat":
            return model
    return None


def api_address(base_url):
    """The public address with exactly one /v1.

    What a shell, Markdown or HTML takes for its own is percent-encoded.
    """
    base_url = base_url.strip().rstrip("/")
    while base_url.endswith("/v1"):
        base_url = base_url.removesuffix("/v1").rstrip("/")
    return re.sub(
        r"""[\s\x00-\x20"'`<>\\^{|}$!\x7f]""", lambda match: quote(match[0]), base_url + "/v1"
    )


def about(model):
    """What the page says of a model."""
    controls = None
    if model.purpose == "chat":
        controls = thinking(model)
    return {
        "id": model.id,
        "loaded": model.loaded,
        "default": model.default,
        "context": model.context,
        "kind": model.purpose,
        "aliases": [*model.aliases, *model.others],
        "reasoning": controls,
    }


def thinking(model):
    """What the controls of thinking do with a model, by the table that is in force for it."""
    table = model.table
    effects = {level.effect for level in table.levels.values()}
    controllable = effects != {reasoning.UNCHANGED}
    quickest = None
    if controllable:
        quickest = "none" if table.can_turn_off else "low"
    return {
        "table": table.name,
        "about": table.about,
        "known": model.origin,
        "controllable": controllable,
        "can_turn_off": table.can_turn_off,
        "quickest": quickest,
        "efforts": [{"words": words, "effect": effect} for words, effect in reasoning.rows(table)],
        "think": {"false": table.levels["none"].effect, "true": table.on.effect},
        "native": native(table),
        "fields": list(reasoning.FIELDS[model.reasoning_field]),
    }


def native(table):
    """The switches of the chat template that the table uses: {name: [its values]}."""
    switches = {}
    for level in table.levels.values():
        for name, value in level.kwargs.items():
            values = switches.setdefault(name, [])
            if value not in values:
                values.append(value)
    return switches


def limits(settings, slots):
    return {
        "active_requests": slots,
        "body_bytes": settings.max_body,
        "keepalive_seconds": settings.keepalive,
        "stall_seconds": settings.stall_timeout,
        "answer_seconds": settings.answer_timeout,
    }


def images(settings):
    """Which images the gateway fetches by their addresses; None: none.

    Names of the operator's own hosts are not for everybody.
    """
    if not settings.image_urls:
        return None
    where = "an image at a host that the operator names"
    if "public" in settings.image_urls:
        where = "a public image"
    return {"where": where, "most": settings.max_images, "bytes": settings.max_image}


def endpoint(route, base_url):
    return {
        "method": route.method,
        "path": route.path,
        "purpose": route.purpose,
        "key": route.keyed,
        "url": base_url.removesuffix("/v1") + route.path,
    }


def refusals(settings):
    size = bytes_text(settings.max_body)
    return [
        {"status": refusal.status, "code": refusal.code, "meaning": meaning.format(max_body=size)}
        for refusal, meaning in MEANINGS.items()
    ]


def examples(name, page):
    """What the macros of the template file `name` give, by their names."""
    module = PAPER.get_template(f"{name}.jinja").make_module(
        {"page": page, "model": page["model"] or NO_MODEL}
    )
    return {part: getattr(module, part)().strip("\n") for part in EXAMPLES[name]}


def notes(page):
    """What an agent should know, a sentence each (Markdown)."""
    found = ["Check `GET /v1/models` before a long run; an empty list means the model is off."]
    quick = page["reasoning"] and page["reasoning"]["quickest"]
    if quick:
        found.append(f'Prefer `reasoning_effort: "{quick}"` for quick tool turns.')
    found.append(f"Expect queueing when more than {page['slots']} streams are active.")
    found.append("Back off on `503` instead of retrying in a tight loop.")
    return found


def groups(models):
    """Models that think alike, for the Markdown form: [(ids, reasoning)]."""
    found = []
    for model in models:
        controls = model["reasoning"]
        known = [other for _, other in found]
        if controls in known:
            found[known.index(controls)][0].append(model["id"])
        elif controls:
            found.append(([model["id"]], controls))
    return found


# ---- how values are written so that nothing in them is taken for markup


def visible(value):
    """One line of printable text: U+FFFD stands for other characters, a line's end among them."""
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))


def prose(value):
    """A value in running Markdown, where it can't be markup: CommonMark 2.4 (escapes), 6.2."""
    value = visible(" ".join(str(value).split()))
    return re.sub(r"[\\`*\[<]|&(?=#?\w+;)|(?<!\S)#|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", value)


def code(value):
    """A value as a Markdown code span, whatever backticks it holds. CommonMark 6.1."""
    value = visible(value)
    fence = "`" * (1 + max(map(len, re.findall("`+", value)), default=0))
    pad = ""
    if value[:1] in ("`", " ", "") or value[-1:] in ("`", " "):
        pad = " "
    return f"{fence}{pad}{value}{pad}{fence}"


def cell(text):
    """Markdown inside a table, where a pipe needs a backslash even in a code span. GFM, tables."""
    return text.replace("|", "\\|")


def literal(value):
    """A value as JSON, which is a literal of Python and JavaScript too."""
    return json.dumps(value, ensure_ascii=False)


def single(text):
    """Text inside a shell's single quotes."""
    return text.replace("'", "'\\''")


def bytes_text(number):
    """1536 -> "1.5 KB" """
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1024 or unit == "GB":
            return f"{round(number, 1):g} {unit}"
        number /= 1024


FILTERS = {
    "prose": prose,
    "code": code,
    "cell": cell,
    "literal": literal,
    "single": single,
    "word": shlex.quote,
    "size": bytes_text,
    "number": "{:,}".format,
    "seconds": "{:g}".format,
}


# ---- the two kinds of template


def templates(**options):
    """A jinja2.Environment of the templates folder."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )
    env.filters |= FILTERS
    return env


PAPER = templates(autoescape=False)
SCREEN = templates(autoescape=True)
for template in ("help.md", *(f"{name}.jinja" for name in EXAMPLES)):
    PAPER.get_template(template)  # at the start: it takes longer than anybody should wait for
SCREEN.get_template("help.html")
MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table")


def as_html(text):
    """The Markdown form for the HTML form: its `body`, and `chapters` as [(anchor, title)]."""
    tokens = MARKDOWN.parse(text)
    chapters = []
    for token, inner in pairwise(tokens):
        if token.type == "heading_open" and token.tag == "h2":
            token.attrSet("id", inner.content.lower().replace(" ", "-"))
            chapters.append((token.attrGet("id"), inner.content))
        if token.type in ("fence", "table_open"):
            token.attrSet("tabindex", "0")  # what scrolls must be in reach of keyboards: WCAG 2.1.1
    body = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
    return {"body": Markup(body), "chapters": chapters}
