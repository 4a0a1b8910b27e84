"""An engine: its address, its connections, what it serves, and looks at how it is."""

from time import time

import orjson
from gevent import Timeout
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from engines.health import Health, Trouble
from engines.http1 import Off, Pool, Silent
from engines.kinds import OTHER, kind_of
from engines.models import has_usable_id, ids_of
from engines.pulse import Pulse
from errors import Refusal
from steps import read

LOOK_TIMEOUT = 10  # seconds for each question of a look
COUNT_TIMEOUT = 10  # seconds for the count of a prompt's tokens
COUNTS = 8  # prompts that one engine is asked to count at once
MAX_LIST = 4 << 20  # bytes of a list of models
MAX_COUNT = 16 << 20  # bytes of the answer to a count: some engines list the tokens too
CANARY = 5  # seconds for the first canary; each further one has twice as long, up to the limit
MOST_CANARIES = 10  # that are counted
GONE = ("off", "loading")  # states of one that was up in which it may have been restarted
UNANSWERED = (500, 502, 503, 504)  # statuses of an engine whose core does not answer
MOST_MODELS = 1000  # of one engine; the others are not looked at
# What the reading of an engine's JSON may meet, which can be of any shape.
ODD_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Engine:
    """One engine.

    pool      connections for requests
    looks     makes a new connection for each question of a look: none can be stale
    health    health.Health: whether it serves, and why not
    pulse     pulse.Pulse: whether it works on what it owes
    was_up    it has served
    canaries  how many in a row it has not answered
    listed    the entries of its list of models as it last was: an engine that is off will likely
              come back with it
    kind      its kinds.Kind
    purpose   what its models are for, "chat" or "embedding"
    look_due  an Event: it is to be looked at now, not only when `settings.poll` is over
    counts    a semaphore for prompts that it is asked to count
    """

    def __init__(self, url, key=None):
        """`key`: the engine's own, sent with everything that it is asked."""
        self.url = url
        self.headers = {}
        if key:
            self.headers["Authorization"] = f"Bearer {key}"
        self.pool = Pool(url)
        self.looks = Pool(url, self.pool.tls)
        self.health = Health(time())
        self.pulse = Pulse()
        self.was_up = False
        self.canaries = 0
        self.listed = []
        self.kind = OTHER
        self.purpose = "chat"
        self.look_due = Event()
        self.counts = BoundedSemaphore(COUNTS)

    @property
    def serves(self):
        """Whether requests may go to it."""
        return bool(self.health.serves and self.listed)

    # -- looks

    def look(self, patience=CANARY):
        """See how it is and what it serves. `patience`: see `test`."""
        try:
            self.note_models(self.ask_models())
            self.test(patience)
        except Trouble as trouble:
            self.health.is_troubled(trouble, time())
        else:
            self.health.is_well(time())
            self.was_up = True
        self.pool.prune()

    def ask_models(self):
        """The entries of its list of models. Raises Trouble."""
        status, body = self.ask("/health")
        if status >= 500:  # any other status: some engines have no such route
            raise self.kind.unwell(status, body)
        status, body = self.ask("/v1/models")
        if status != 200:
            raise self.kind.unlisted(status, body)
        try:
            served = [entry for entry in read(body)["data"][:MOST_MODELS] if has_usable_id(entry)]
        except ODD_JSON:
            raise Trouble(
                "misconfigured", "its /v1/models is no list of models: is it an OpenAI server?"
            ) from None
        if not served:
            raise Trouble("misconfigured", "it lists no model")
        return served

    def ask(self, path):
        """(status, body) of a GET. Raises Trouble."""
        try:
            return self.get(path)
        except Off as error:
            raise Trouble("off", error.reason, error.sure) from None
        except Silent:
            reason = f"it has not answered {path} within {LOOK_TIMEOUT} s"
            raise Trouble("busy", reason) from None
        except Refusal as error:
            # What follows is advice for a client.
            raise Trouble("off", f"{path}: {error.message.partition(';')[0]}") from None

    def note_models(self, served):
        changed = ids_of(served) != ids_of(self.listed)
        self.listed = served
        if changed:
            self.kind = kind_of(served[0])
            self.purpose = self.ask_purpose()

    def ask_purpose(self):
        """What its models are for."""
        try:
            return self.kind.purpose(lambda path: self.get(path)[0])
        except (Silent, Refusal):
            return self.purpose

    # -- the canary

    def test(self, patience):
        """Have one that is in doubt answer a canary: its lists and its health come from its server,
        not from its core. Raises Trouble.

        patience  the most seconds that this may take
        """
        is_stuck = self.health.word == "stuck"
        is_back = self.was_up and self.health.word in GONE and not self.pulse.owed
        if not is_stuck and not is_back:
            return
        canary = self.kind.canary(self.listed[0], self.purpose)
        seconds = min(min(CANARY, patience) * 2**self.canaries, max(CANARY, patience))
        if canary and (self.pulse.owed or not self.answers(*canary, seconds)):
            self.canaries = min(self.canaries + 1, MOST_CANARIES)
            word = "stuck" if is_stuck else "loading"
            raise Trouble(word, "it has not answered a test request yet", sure=True)
        self.canaries = 0
        self.pulse.forget()

    def answers(self, path, body, seconds):
        """Whether it answers a POST within so many seconds; a refusal is an answer, too."""
        try:
            with Timeout(seconds, Silent):
                answer = self.looks.post(path, [orjson.dumps(body)], self.headers, harmless=True)
            try:
                answer.all(seconds, MAX_LIST)
                return answer.status not in UNANSWERED
            finally:
                answer.close()
        except (Silent, Refusal):
            return False

    # -- questions

    def get(self, path, seconds=None, most=MAX_LIST):
        """(status, body) of a GET, within so many seconds and bytes. Raises Silent, Refusal."""
        seconds = seconds or LOOK_TIMEOUT
        reason = "unreachable: it takes no connection"
        if self.looks.tls:
            reason = "TLS: no connection came about: does it speak https at all?"
        late = Off("the engine does not answer", reason)
        with Timeout(seconds, late):  # the name's look-up included
            answer = self.looks.get(path, self.headers)
        try:
            body = answer.all(seconds, most)
            return answer.status, body
        finally:
            answer.close()

    def post(self, path, body):
        """The body of the answer to a question; b"" if it is no 200. Raises Silent, Refusal."""
        answer = self.pool.post(path, body, self.headers, harmless=True)
        try:
            data = answer.all(COUNT_TIMEOUT, MAX_COUNT)
            return data if answer.status == 200 else b""
        finally:
            answer.close(answer.ended)
