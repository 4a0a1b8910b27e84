"""How many tokens a request has used: its engine's figures, or an estimate for what the engine has
not said, because it never does, or because the client had left by then. Pure.

What the estimates go by is learned, for each model, from answers whose engine did count.
"""

import re
from collections import deque
from hashlib import blake2b
from math import log
from typing import NamedTuple

import steps
from mending.thinking import NAMES
from values import as_dict, object_in, objects_in

MOST_BYTES = 8  # of a token of a long text, at most
BYTES_A_TOKEN = 4  # until a model has shown how many they are
IMAGE_TOKENS = 1500  # the length of an image is none of its tokens
ANSWER = 1000  # tokens of an answer, until a model has shown how many they are
ANSWERS = 16  # of which so many are remembered
KEPT = 64  # lengths that a Yardstick remembers
NEAREST = 3
MIX = 20  # of a Length: 1/20 of it makes a text as different as one that is 2.7 times as long
MOST_TOKENS = 1 << 40  # of one request; more is no figure, and would break the ledger's sums
MOST_LEARNED = 1 << 24  # where a model has not said how long its context is
IMAGE = b'"url":"data:'  # in a request to an engine; inside of a text its quotes would be escaped
# What some clients set where their history ends, so with each turn in another place. Engines pass
# over it. Of a text it is likewise no part.
CACHE_MARK = re.compile(rb',"cache_control":(?:null|\{[^{}]*+\})')
BATCH = 1 << 20  # bytes that are looked at in one go, about
HEAD = 64  # bytes in which an image's end is sought, of a part that begins inside of it
BLOCK = 1 << 14  # bytes of a text for each of its hashes
HASH = 8  # bytes of one
SAMPLE = 1 << 14  # bytes of a text that stand for all of it
DIGITS = b"0123456789"
LONG = 1 << 20  # characters of an answer from which its bytes are estimated
BEYOND_ASCII = bytes(range(128, 256))


class Length(NamedTuple):
    """size  in bytes, or in whatever a Yardstick measures
    mix   what they are: digits make it greater, for there are few in a token; characters beyond
          ASCII, which have several bytes, make it less
    """

    size: int
    mix: float = 0.0


class Measure(NamedTuple):
    """What is known of a request before any engine has it.

    length   the Length of its text: all but its images
    images   how many these are
    hashes   a Chain's, if there was one
    """

    length: Length
    images: int
    hashes: tuple = ()


class Yardstick:
    """Tells tokens by something that grows with them, and learns from what engines count.

    Of what it has seen the most similar counts: conversations grow by turns. It takes the middle of
    that, so that a single slip of an engine is nothing.

    start    the Length and its tokens to go by while nothing was seen
    rates    how many tokens what goes beyond a length has for each unit: at least, at most
    nearest  how many of the lengths that were seen count
    """

    def __init__(self, start, rates, nearest=NEAREST):
        self.start = start
        self.rates = rates
        self.nearest = nearest
        self.seen = deque(maxlen=KEPT)

    def learn(self, length, tokens):
        if length.size > 0 and tokens > 0:
            self.seen.append((length, tokens))

    def estimate(self, length):
        """How many tokens something of that Length has likely got."""
        if length.size <= 0:
            return 0
        seen = [*reversed(self.seen)] or [self.start]
        seen.sort(key=lambda one: distance(length, one[0]))
        found = sorted(self.by(*one, length) for one in seen[: self.nearest])
        return max(1, round(found[(len(found) - 1) // 2]))

    def guess(self, length):
        """The same by what was seen last: at no cost, where it need not be exact."""
        known, tokens = self.seen[-1] if self.seen else self.start
        return max(1, round(self.by(known, tokens, length)))

    def by(self, known, tokens, length):
        """The same by one Length. A template adds as much to a short prompt as to a long one."""
        least, most = self.rates
        rate = min(tokens / known.size, most)
        if length.size > known.size:
            rate = max(rate, least)
        return tokens + (length.size - known.size) * rate


def distance(one, other):
    return abs(log(one.size / other.size)) + MIX * abs(one.mix - other.mix)


class Meter:
    """What is known of one model's tokens.

    prompts   by the bytes of a request as its engine gets it, without images
    streams   by the events of an answer: one can hold several tokens
    texts     by the bytes of what a plain answer says
    times     by the milliseconds that an answer took
    answers   how many the last answers had
    """

    def __init__(self):
        """As long as it has learned nothing."""
        self.answers = deque(maxlen=ANSWERS)
        self.prompts = Yardstick((Length(BYTES_A_TOKEN), 1), (1 / 5, 1))
        self.streams = Yardstick((Length(1), 1), (1, 1000), KEPT)
        self.texts = Yardstick((Length(BYTES_A_TOKEN), 1), (1 / 5, 1))
        self.times = Yardstick((Length(50), 1), (0, 10))

    @property
    def answer(self):
        """How many an answer usually has: the middle of the last ones."""
        seen = sorted(self.answers) or [ANSWER]
        return seen[len(seen) // 2]

    def begin_with(self, bytes_a_token):
        """What to go by while nothing was seen: how many bytes a token of this model has."""
        for yardstick in (self.prompts, self.texts):
            yardstick.start = (Length(bytes_a_token), 1)


class Tally:
    """How many tokens one request uses.

    meter     its model's Meter
    length, images, hashes
              see Measure
    context   how many tokens the model can take, or None
    most      how many the client wants, or None
    counted   its prompt's length where the engine was asked for it, or None
    said      the Length of a plain answer, once it has come; else None
    """

    def __init__(self, meter, parts, context=None, most=None, measured=None):
        """
        parts     the request as its engine gets it, a list of bytes
        measured  its Measure, where that is known
        """
        self.meter = meter
        self.length, self.images, self.hashes = measured or measure(parts)
        self.context = context
        self.most = most
        self.counted = None
        self.said = None

    def figures(self, usage, stream=None, worked=0):
        """A Row's columns of tokens as a dict.

        usage   the engine's figures, or whatever it sent in their place
        stream  the stream of stream.py that has read the answer; None for a plain one
        worked  milliseconds for which an engine was at a plain answer that nobody waited for
        """
        found = {
            "prompt_tokens": token_count(usage, "prompt_tokens"),
            "completion_tokens": token_count(usage, "completion_tokens"),
            "cached_tokens": detail(usage, "prompt_tokens_details", "cached_tokens"),
            "reasoning_tokens": detail(usage, "completion_tokens_details", "reasoning_tokens"),
        }
        own = {}
        if not found["prompt_tokens"]:  # some engines say 0 while they don't know
            own["prompt_tokens"] = self.prompt()
        is_whole = found["completion_tokens"] is not None or self.most == 0 and not own
        if stream is None and not is_whole:  # the figures of an embedding are its prompt's alone
            own["completion_tokens"] = self.plain(worked)
        if stream is not None and not is_final(stream, found["completion_tokens"]):
            tokens = self.streamed(stream)
            thoughts = tokens * stream.thoughts // max(1, stream.tokens)
            own |= {"completion_tokens": tokens, "reasoning_tokens": thoughts}
        if own:
            own["counted"] = "gateway"
        found.update(own)
        return {name: value for name, value in found.items() if value is not None}

    def take(self, answer):
        """Note how long a plain answer is: a completion (a dict), or the bytes of a stream that
        nobody asked for."""
        if isinstance(answer, dict):
            self.said = length_of_answer(answer)
        else:
            self.said = Length(events_in(answer) * BYTES_A_TOKEN)

    def is_counted(self, stream):
        """Whether its engine has counted all of it by now."""
        return "counted" not in self.figures(stream.usage, stream)

    # -- what its engine has not counted

    def prompt(self):
        if self.counted is not None:
            return self.counted
        tokens = self.meter.prompts.estimate(self.length) + self.images * IMAGE_TOKENS
        return min(tokens, self.context or tokens)

    def rough_prompt(self):
        """The same at no cost, for a prompt that is too short for it to matter."""
        return self.meter.prompts.guess(self.length) + self.images * IMAGE_TOKENS

    def careful_prompt(self):
        """The same where fewer than there are would do harm, whatever an engine has said."""
        return max(self.prompt(), self.length.size // MOST_BYTES)

    def answer(self):
        """How many tokens its answer is likely to have."""
        return self.bounded(self.meter.answer)

    def streamed(self, stream):
        """The tokens of an answer as far as a stream has seen it."""
        before = token_count(stream.usage, "completion_tokens")
        since = stream.tokens - stream.tokens_at_usage
        if not before:  # else its engine tells it all along
            before = stream.ends
            since = stream.tokens - stream.ends
        return self.bounded(before + self.meter.streams.estimate(Length(since)))

    def plain(self, worked):
        """The tokens of a plain answer: by its length, or by the time that it took."""
        if self.said is not None:
            return self.meter.texts.estimate(self.said)
        return self.bounded(self.meter.times.estimate(Length(worked)))

    def bounded(self, tokens):
        """No more of an answer than the client wants and the model can."""
        limits = [limit for limit in (self.most, self.context) if limit is not None]
        return min([tokens, *limits])

    # -- what its engine has counted

    def learn(self, usage, stream, milliseconds):
        """Learn from an answer that is whole and took so long, if its engine's figures can be."""
        limit = self.context or MOST_LEARNED
        prompt = token_count(usage, "prompt_tokens") or 0
        tokens = token_count(usage, "completion_tokens") or 0
        if max(prompt, tokens) > limit:
            return
        if not self.images:
            self.meter.prompts.learn(self.length, prompt)
        if stream is not None:
            events = Length(stream.tokens - stream.ends)
            self.meter.streams.learn(events, tokens - stream.ends)
        if self.said is not None:
            self.meter.texts.learn(self.said, tokens)
        self.meter.times.learn(Length(milliseconds), tokens)
        if tokens > 0:
            self.meter.answers.append(tokens)


class Chain:
    """Hashes of the beginning of a text: one for each whole BLOCK, of all up to its end. Texts have
    as many of them in common as they have blocks that are the same from the first one on.

    key   bytes that nobody else knows, so that a hash tells nobody anything
    name  whose text it is: the same text has other hashes under another name
    """

    def __init__(self, key, name):
        """Nothing has come yet."""
        self.key = key
        self.name = name
        self.state = None
        self.rest = b""  # of a block
        self.hashes = []

    def feed(self, text):
        """Some more of the text."""
        text = self.rest + text
        whole = len(text) - len(text) % BLOCK
        if whole and not self.state:
            self.state = blake2b(self.name.encode(), key=self.key, digest_size=HASH)
        for at in range(0, whole, BLOCK):
            self.state.update(text[at : at + BLOCK])
            self.hashes.append(self.state.copy().digest())
        self.rest = text[whole:]


# ---- figures


def token_count(usage, name):
    """That figure, or None where an engine sent something else than a number of tokens."""
    value = usage.get(name) if isinstance(usage, dict) else None
    if type(value) is int and 0 <= value <= MOST_TOKENS:  # JSON's true is an int to isinstance
        return value
    return None


def detail(usage, table, name):
    return token_count(as_dict(usage).get(table), name)


def is_final(stream, tokens):
    """Whether `tokens`, the engine's figure or None, counts all that a stream has seen."""
    if tokens is None or stream.tokens - stream.tokens_at_usage > stream.ends:
        return False
    return tokens > 0 or stream.tokens <= stream.ends


# ---- lengths


def length_of(text):
    """The Length of a text (bytes)."""
    sample = text[:: 1 + len(text) // SAMPLE]
    if not sample:
        return Length(0)
    digits = len(sample) - len(sample.translate(None, DIGITS))
    beyond = len(sample) - len(sample.translate(None, BEYOND_ASCII))
    return Length(len(text), (digits - beyond / 4) / len(sample))


def measure(parts, chain=None):
    """The Measure of a request to an engine, a list of bytes or of what is like them.

    chain   a Chain for its text, or None
    """
    size = 0
    mixed = 0.0
    images = 0
    for text, begun in batches(parts):
        length = length_of(text)
        size += length.size
        mixed += length.size * length.mix
        images += begun
        if chain:
            chain.feed(CACHE_MARK.sub(b"", text))
    hashes = tuple(chain.hashes) if chain else ()
    return Measure(Length(size, mixed / max(size, 1)), images, hashes)


def batches(parts):
    """(text, how many images began in it) of a request, so much at a time."""
    texts = []
    size = 0
    images = 0
    for text, begun in without_images(parts):
        texts.append(text)
        size += len(text)
        images += begun
        if size >= BATCH:
            yield b"".join(texts), images
            texts = []
            size = 0
            images = 0
    yield b"".join(texts), images


def without_images(parts):
    """The same piece by piece. What goes of an image is its address, and that name of a field."""
    rest = b""  # what the next piece follows: IMAGE inside of one, else what may be its beginning
    since = 0  # bytes since the last pause: a short request makes none
    for part in parts:
        if rest == IMAGE and len(part) > SAMPLE and b'"' not in bytes(part[:HEAD]):
            continue  # all of it is the image's, and not gone over
        for at in range(0, len(part), BATCH):
            since += min(BATCH, len(part) - at)
            if since > SAMPLE:
                steps.pause()
                since = 0
            begun = -int(rest == IMAGE)
            first, *images = (rest + bytes(part[at : at + BATCH])).split(IMAGE)
            ends = [from_quote(image) for image in images]
            text = b"".join([first, *ends])
            if images and not ends[-1]:
                rest = IMAGE
            else:
                rest = text[1 - len(IMAGE) :]
                text = text[: 1 - len(IMAGE)]
            yield text, begun + len(images)
    if rest != IMAGE:
        yield rest, 0


def from_quote(text):
    """The part of a text that begins with the first quote in it."""
    _, quote, after = text.partition(b'"')
    return quote + after


def events_in(stream):
    """How many events are in the bytes of a stream."""
    found = 0
    for at in range(0, len(stream), LONG):
        steps.pause()
        found += stream.count(b"data:", at, at + LONG + len(b"data:") - 1)
    return found


def length_of_answer(completion):
    """The Length of what a whole completion (a dict) says: texts, thoughts, arguments of calls."""
    found = []
    for choice in objects_in(completion, "choices"):
        steps.pause()
        message = object_in(choice, "message")
        thoughts = [message[name] for name in NAMES if message.get(name)]
        calls = [object_in(call, "function") for call in objects_in(message, "tool_calls")]
        said = [choice.get("text"), message.get("content"), message.get("refusal")]
        said += thoughts[:1] + [function.get("arguments") for function in calls]
        found.append("".join(text for text in said if isinstance(text, str)))
    if sum(map(len, found)) > LONG:
        return length_of_texts(found)
    return length_of("".join(found).encode("utf-8", "replace"))


def length_of_texts(texts):
    """The Length of large texts (a list of str), of each of which a part stands for all of it."""
    size = 0
    samples = []
    every = 1 + sum(map(len, texts)) // SAMPLE
    for text in texts:
        steps.pause()
        sample = text[::every].encode("utf-8", "replace")
        samples.append(sample)
        size += len(sample) * len(text) // max(1, len(text[::every]))
    return Length(size, length_of(b"".join(samples)).mix)
