"""How a gate is asked, with what a gateway can know: the bytes of a prompt, hashes of its
beginning, the moment of a first token, and the usage of a request that has ended.

A policy has `open`, `preload`, `enter`, `first_token`, `leave` and `tick`. The last four return the
requests that run from then on, each with its place.
"""

from functools import partial

from admission import Gate, Limits, Need, Seats
from counting import Length, Meter

MODEL = "model"
MOST_WAITING = 400
ANSWER = 1000  # tokens that a gateway expects of an answer
HEAVY = 8_000  # the setting as it comes
KV = 0.9  # of the cache is counted on
PACE = 1450  # tokens a second of the prompts that were read before the trace
BEGINNING = 1_700_000_000  # of a trace, by the clocks of the gate


class Direct:
    """No gate: whatever comes goes to an engine at once."""

    def open(self, world):
        self.homes = {}
        self.names = list(world.servers)

    def preload(self, requests):
        for request in requests:
            self.enter(request, 0)

    def enter(self, request, now):
        home = self.names[len(self.homes) % len(self.names)]
        request.place = self.homes.setdefault(request.text, home)
        return [request]

    def first_token(self, request, now):
        return []

    def leave(self, request, now):
        return []

    def tick(self, now):
        return []


class Gated:
    """admission.Gate, of which a prompt of so many tokens is a heavy one; 0: today's, which is told
    nothing of tokens."""

    def __init__(self, heavy=0):
        self.heavy = heavy
        self.gate = Gate(MOST_WAITING, heavy)
        self.meter = Meter()
        self.requests = {}
        self.homes = {}

    def open(self, world):
        self.world = world
        places = {}
        for name, server in world.servers.items():
            capacity = int(KV * server.engine.hardware.capacity)
            places[name] = Seats(server.engine.flags.sequences, capacity=capacity)
        self.gate.arrange({MODEL: tuple(places)}, places, BEGINNING)

    def preload(self, requests):
        """One after the other, each with as long a rest as its key may need."""
        now = -3 * sum(request.prompt for request in requests) / PACE
        for request in requests:
            self.enter(request, now)
            now += request.prompt / PACE
            self.first_token(request, now)
            self.leave(request, now)
            now += 2 * request.prompt / PACE

    def enter(self, request, now):
        limits = Limits(share=self.world.shares.get(request.key))
        home = self.homes.get(request.text)
        ticket, granted = self.gate.enter(
            request.key, MODEL, limits, now + BEGINNING, home, self.need(request)
        )
        request.ticket = ticket
        self.requests[ticket] = request
        return self.start(granted)

    def need(self, request):
        """What a gateway knows of a request."""
        if not self.heavy:
            return Need()
        tokens = self.meter.prompts.estimate(Length(request.size))
        return Need(
            tokens=tokens,
            answer=ANSWER,
            hashes=request.hashes,
            size=request.size,
            batch=request.batch,
            whole=request.whole,
        )

    def first_token(self, request, now):
        return self.start(self.gate.first_token(request.ticket, now + BEGINNING))

    def leave(self, request, now):
        del self.requests[request.ticket]
        self.homes[request.text] = request.place
        self.meter.prompts.learn(Length(request.size), request.prompt)
        usage = (request.prompt, request.cached, request.answer)
        return self.start(self.gate.leave(request.ticket, sum(usage), True, now + BEGINNING, usage))

    def tick(self, now):
        return self.start(self.gate.tick(now + BEGINNING))

    def start(self, granted):
        requests = [self.requests[ticket] for ticket in granted]
        for request in requests:
            request.place = request.ticket.place
        return requests


POLICIES = {"none": Direct, "today": Gated, "new": partial(Gated, HEAVY)}
