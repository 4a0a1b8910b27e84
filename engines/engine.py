"""An engine: its address, its connections, what it serves, and looks at how it is."""

from time import monotonic, time

from gevent import Timeout
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from engines.health import Health, Trouble
from engines.http1 import BadAnswer, Off, Pool, Silent
from engines.kinds import OTHER, kind_of
from engines.models import has_usable_id, ids_of
from errors import Refusal
from steps import read

LOOK_TIMEOUT = 10  # seconds for each question of a look
COUNT_TIMEOUT = 10  # seconds for the count of a prompt's tokens
COUNTS = 8  # prompts that one engine is asked to count at once
MAX_LIST = 4 << 20  # bytes of a list of models
MAX_COUNT = 16 << 20  # bytes of the answer to a count: some engines list the tokens too
MOST_MODELS = 1000  # of one engine; the others are not looked at
# What the reading of an engine's JSON may meet, which can be of any shape.
ODD_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Engine:
    """One engine.

    pool      connections for requests
    looks     makes a new connection for each question of a look: none can be stale
    health    health.Health: whether it serves, and why not
    listed    the entries of its list of models as it last was: an engine that is off will likely
              come back with it
    kind      its kinds.Kind
    purpose   what its models are for, "chat" or "embedding"
    resting   the ids of the models that it lists and loads when a request wants them
    look_due  an Event: it is to be looked at now, not only when `settings.poll` is over
    looked    the monotonic moment at which the last look ended
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
        self.listed = []
        self.resting = frozenset()
        self.kind = OTHER
        self.purpose = "chat"
        self.look_due = Event()
        self.looked = 0.0
        self.counts = BoundedSemaphore(COUNTS)

    @property
    def serves(self):
        """Whether requests may go to it."""
        return bool(self.health.serves and self.listed)

    # -- looks

    def look(self):
        """See how it is and what it serves."""
        try:
            served = self.ask_models()
        except Trouble as trouble:
            if self.is_heard and not trouble.sure:
                trouble = Trouble("busy", trouble.reason)
            self.health.is_troubled(trouble, time())
        else:
            self.note_models(served)
            self.health.is_well(time())
        self.looked = monotonic()
        self.pool.prune()

    @property
    def is_heard(self):
        """Whether requests show that it is well, better than any look could: something came to one
        of them since the last look, and none went wrong after that."""
        return self.pool.heard > max(self.looked, self.pool.failed, self.pool.ailed)

    @property
    def fails(self):
        """Whether the last that came of requests was nothing."""
        return self.pool.failed > self.pool.heard

    def ask_models(self):
        """The entries of its list of models. Raises Trouble."""
        if not self.is_heard:
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
            word = "busy" if error.ours else "off"
            raise Trouble(word, error.reason, error.sure) from None
        except Silent:
            reason = f"it has not answered {path} within {LOOK_TIMEOUT} s"
            raise Trouble("busy", reason) from None
        except BadAnswer as error:
            reason = f"{path}: {error.message}: is it an OpenAI server?"
            raise Trouble("misconfigured", reason) from None
        except Refusal as error:  # one with too much to do may close it, too
            word = "off" if self.fails else "busy"
            # What follows in the message is advice for a client.
            raise Trouble(word, f"{path}: {error.message.partition(';')[0]}") from None

    def note_models(self, served):
        changed = ids_of(served) != ids_of(self.listed)
        self.listed = served
        if changed:
            self.kind = kind_of(served[0])
            self.purpose = self.ask_purpose()
        self.resting = frozenset(entry["id"] for entry in served if not self.kind.is_loaded(entry))

    def ask_purpose(self):
        """What its models are for."""
        try:
            return self.kind.purpose(lambda path: self.get(path)[0])
        except (Silent, Refusal):
            return self.purpose

    # -- questions

    def get(self, path):
        """(status, body) of a GET. Raises Silent, Refusal."""
        late = Off("the engine does not answer", "unreachable: it takes no connection")
        if self.looks.tls:
            late.reason = "TLS: no connection came about: does it speak https at all?"
            if self.listed and not self.fails:  # it did, and has much to do by now
                late = Silent
        with Timeout(LOOK_TIMEOUT, late):  # the name's look-up included
            answer = self.looks.get(path, self.headers)
        try:
            body = answer.all(LOOK_TIMEOUT, MAX_LIST)
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
