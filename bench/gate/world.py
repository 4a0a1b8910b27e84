"""Time, requests, and what becomes of them between clients, gate and engines: a simulation of
discrete events."""

import heapq
from collections import defaultdict
from itertools import count

from .engine import Engine
from .hardware import FOUR, GOOD

HASHED = 1 << 14  # bytes of a prompt for which a gateway has one hash
ANSWER = 4  # what a token of an answer is worth, in tokens of a prompt
COMMON_RATE = 3.9  # bytes a token of what conversations share
MINUTE = 60


class Text:
    """What a conversation says: a beginning that it shares with others, and then its own.

    name    of the conversation
    shared  (name, tokens) of the beginning
    rate    bytes a token, which no gate knows
    """

    def __init__(self, name, shared, rate):
        self.name = name
        self.shared = shared
        self.rate = rate

    def blocks(self, tokens, block):
        """The names of its first blocks of so many tokens each."""
        return self.parts(tokens // block, self.shared[1] // block)

    def hashes(self, size):
        """The same as a gateway has them, of its first bytes."""
        common = int(self.shared[1] * COMMON_RATE)
        parts = self.parts(size // HASHED, common // HASHED)
        return tuple(f"{name} {number}".encode() for name, number in parts)

    def parts(self, total, common):
        return [(self.shared[0] if at < common else self.name, at) for at in range(total)]


class Request:
    """What a client sends, and what became of it.

    key        whose it is
    kind       what it counts as: "warm", "cold", "task" or "job"
    prompt     tokens; `size` is its bytes, which is all that a gate sees of them
    answer     tokens that the engine will make
    batch      whether it may come last
    whole      whether it is no stream, so that nobody sees its first token
    arrived, granted, first, ended
               moments, None until then
    cached     tokens of the prompt that were in the engine's cache
    gap        the longest time between two tokens
    place      the name of the engine where it runs
    """

    def __init__(self, key, kind, text, prompt, answer, batch=False):
        self.key = key
        self.kind = kind
        self.text = text
        self.prompt = prompt
        self.answer = answer
        self.batch = batch
        self.whole = False
        self.arrived = self.granted = self.first = self.ended = None
        self.cached = 0
        self.gap = 0.0
        self.place = None

    @property
    def size(self):
        return int(self.prompt * self.text.rate)

    @property
    def hashes(self):
        return self.text.hashes(self.size)

    def waited(self, until):
        """Seconds at the gate; of one that still waits, so far."""
        return (self.granted if self.granted is not None else until) - self.arrived


class World:
    """Clients, a gate and engines, with a time of their own.

    policy    a gate, as policies.py has them
    whole     kinds of requests that want their answer whole
    before    requests that ran before it begins
    shares    {key: weight of its turns}, where that is not 1
    requests  all that were sent since
    work      of each minute and key, what engines did for it, in tokens of a prompt
    """

    def __init__(self, policy, hardware=FOUR, flags=GOOD, engines=1, whole=()):
        self.policy = policy
        self.whole = whole
        self.now = 0.0
        self.events = []
        self.order = count()
        self.before = []
        self.shares = {}
        self.requests = []
        self.thens = {}
        self.texts = count()
        self.work = defaultdict(lambda: defaultdict(float))
        self.servers = {}
        for number in range(engines):
            self.servers[f"engine {number}"] = Server(self, Engine(hardware, flags))
        policy.open(self)
        self.tick()

    @property
    def done(self):
        return sorted(
            (one for one in self.requests if one.ended is not None), key=lambda one: one.ended
        )

    @property
    def preemptions(self):
        return sum(server.engine.preemptions for server in self.servers.values())

    # -- time

    def at(self, moment, call, *arguments):
        heapq.heappush(self.events, (moment, next(self.order), call, arguments))

    def run(self, until):
        while self.events and self.events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
        self.now = until
        return self

    def tick(self):
        self.start(self.policy.tick(self.now))
        self.at(self.now + 1, self.tick)

    # -- requests

    def submit(self, request, then=None):
        """A client sends a request, and does `then` with it once it has ended."""
        request.arrived = self.now
        request.whole = request.kind in self.whole
        self.requests.append(request)
        self.thens[request] = then
        self.start(self.policy.enter(request, self.now))

    def start(self, requests):
        """Those run from now on."""
        for request in requests:
            request.granted = self.now
            self.servers[request.place].engine.add(request)
        for name in dict.fromkeys(request.place for request in requests):
            self.servers[name].wake()

    def begin(self, request, cached):
        """Its first token has come."""
        request.first = self.now
        request.cached = cached
        if not request.whole:
            self.start(self.policy.first_token(request, self.now))

    def end(self, request):
        request.ended = self.now
        self.start(self.policy.leave(request, self.now))
        then = self.thens.pop(request)
        if then is not None:
            then(request)

    def note_work(self, request, tokens):
        self.work[int(self.now // MINUTE)][request.key] += tokens

    def preload(self):
        """The turns before the first: their conversations are in the engines' caches, and known to
        the gate."""
        self.policy.preload(self.before)
        for request in self.before:
            self.servers[request.place].engine.preload(request)


class Server:
    """An engine that works step by step in a world's time.

    tokens_at  when a sequence had its last token
    """

    def __init__(self, world, engine):
        self.world = world
        self.engine = engine
        self.is_busy = False
        self.tokens_at = {}

    def wake(self):
        if not self.is_busy:
            self.step()

    def step(self):
        step = self.engine.schedule()
        self.is_busy = bool(step)
        if step:
            seconds = self.engine.seconds(step)
            times = self.repeats(step, seconds)
            self.world.at(self.world.now + seconds * times, self.finish, step, seconds, times)

    def repeats(self, step, seconds):
        """How many steps like this one come before anything else happens."""
        engine = self.engine
        if engine.waiting and not engine.is_full or not self.world.events:
            return 1
        if not all(sequence.decodes for sequence in step):
            return 1
        until = (self.world.events[0][0] - self.world.now) / seconds
        return max(1, int(min(until, *map(engine.steps_left, step))))

    def finish(self, step, seconds, times):
        """A step is over, or several of the same kind."""
        for sequence, tokens in step.items():
            if sequence.decodes:
                made = self.engine.decode(sequence, times)
                self.world.note_work(sequence.request, ANSWER * made)
                self.token(sequence, seconds if times > 1 else None)
                continue
            self.world.note_work(sequence.request, tokens)
            is_first = not sequence.made
            if self.engine.read(sequence, tokens):
                if is_first:
                    self.world.begin(sequence.request, sequence.cached)
                self.token(sequence)
        for sequence in [sequence for sequence in step if sequence.left <= 0]:
            self.engine.end(sequence)
            del self.tokens_at[sequence]
            self.world.end(sequence.request)
        self.step()

    def token(self, sequence, gap=None):
        """A token has come, so long after the one before, or now."""
        now = self.world.now
        if gap is None:
            gap = now - self.tokens_at.get(sequence, now)
        sequence.request.gap = max(sequence.request.gap, gap)
        self.tokens_at[sequence] = now
