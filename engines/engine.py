"""An engine: its address, its connections, what it serves, and looks at how it is."""

import json
import logging
from contextlib import suppress
from time import monotonic, time

import gevent
import orjson
from gevent import Timeout
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from engines.found import Found
from engines.health import Health, Trouble
from engines.http1 import BadAnswer, Off, Pool, Silent
from engines.kinds import NO_FIGURES, OTHER, kind_of, works
from engines.models import groups_of, has_usable_id, ids_of
from engines.pulse import Pulse
from errors import Refusal
from steps import LIGHT, read, weight

logger = logging.getLogger("sparks")
LOOK_TIMEOUT = 10  # seconds for each question of a look
COUNT_TIMEOUT = 10  # seconds for the count of a prompt's tokens
COUNTS = 8  # prompts that one engine is asked to count at once
MAX_LIST = 4 << 20  # bytes of a list of models
MAX_COUNT = 16 << 20  # bytes of the answer to a count: some engines list the tokens too
LAST_LOOKS = 5  # at one that may have ended just now
LAST_LOOK = 1  # seconds for each of them
LAST_PAUSE = 0.1  # seconds between two
CANARY = 5  # seconds for the first canary; each further one has twice as long, up to the limit
MOST_CANARIES = 10  # that are counted
GONE = ("off", "loading", "misconfigured")  # states in which one may have been restarted
ASK_TIMEOUT = 60  # seconds for what is asked about the models: a busy engine is slow
ASK_PATIENCE = 1  # seconds of them for which a look waits
PROGRESS_TIMEOUT = 5  # seconds for each part of the question how far it is
MAX_PAGE = 1 << 19  # bytes of the answer
NOT_IMPLEMENTED = 501  # a status that says that it has no such answer
MAX_TOLD = 1 << 20  # bytes of the answer to such a question
PURPOSE_LOOKS = 5  # that ask what its models are for
MOST_MODELS = 1000  # of one engine; the others are not looked at
MOST_REMEMBERED = 100  # of them until the next start
MEMORY = 4 * LIGHT  # of what these are, as steps.weight counts
# What the reading of an engine's JSON may meet, which can be of any shape.
ODD_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Engine:
    """One engine.

    pool      connections for requests
    signs     signs.Signs of these requests
    looks     makes a new connection for each question of a look: none can be stale
    health    health.Health: whether it serves, and why not
    pulse     pulse.Pulse: whether it works on what it owes
    was_up    it has served
    is_ours   the gateway starts it itself: until it has served, it is about to
    canaries  how many in a row it has not answered
    listed    the entries of its list of models as it last was, at first that of an earlier start:
              an engine that is off will likely come back with it
    kind      its kinds.Kind
    purpose   what its models are for, "chat" or "embedding"
    purpose_due
              how many looks may still ask that
    resting   the ids of the models that it lists and loads when a request wants them
    look_due  an Event: it is to be looked at now, not only when `settings.poll` is over
    looked    the monotonic moment at which the last look ended
    answered  the same of the last one that it answered in time
    counts    a semaphore for prompts that it is asked to count
    slots     of each of its models, and `weight`: see admission.Seats
    scheduling
              what it goes by among its requests, one of settings.POLICIES
    found     {weights of a model: found.Found}
    asking    the greenlet that asks about models, or None
    """

    def __init__(self, url, key=None):
        """`key`: the engine's own, sent with everything that it is asked."""
        self.url = url
        self.use_key(key)
        self.slots = self.weight = 1
        self.scheduling = "fcfs"
        self.pool = Pool(url)
        self.signs = self.pool.signs
        self.looks = Pool(url, self.pool.tls)
        self.health = Health(time())
        self.pulse = Pulse()
        self.was_up = self.is_ours = False
        self.canaries = 0
        self.listed = []
        self.resting = frozenset()
        self.kind = OTHER
        self.purpose = "chat"
        self.purpose_due = PURPOSE_LOOKS
        self.look_due = Event()
        self.looked = self.answered = 0.0
        self.counts = BoundedSemaphore(COUNTS)
        self.found = {}
        self.asking = None

    def remember(self, listed, purpose):
        """What it had at an earlier start of the gateway, until it says what it has now."""
        self.listed = listed
        self.purpose = purpose
        self.kind = kind_of(listed[0])

    def memory(self):
        """The entries for that, as JSON: none that is too large to be written in one step, and as
        many as are a few steps in all."""
        left = MEMORY
        kept = []
        for entry in self.listed[:MOST_REMEMBERED]:
            with suppress(RecursionError):  # JSON is read deeper than it is written
                size = weight(entry)
                left -= min(size, LIGHT)  # what there is to do for one that is too large
                if left < 0:
                    break
                if size <= LIGHT:
                    kept.append(json.dumps(entry))
        return f"[{', '.join(kept)}]"

    def use_key(self, key):
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def serves(self):
        """Whether requests may go to it."""
        return bool(self.health.serves and self.listed)

    # -- looks

    def look(self, patience=CANARY):
        """See how it is and what it serves. `patience`: the seconds after which one that answers
        nothing at all is stuck; see also `test`."""
        try:
            self.note_models(self.ask_models())
            self.test(patience)
            word = self.health.word
            self.get_to_know()
            if self.health.word != word and not self.health.answers:  # it was found out meanwhile
                raise Trouble(self.health.word, self.health.reason, sure=True)
        except Trouble as trouble:
            if self.signs.are_good_since(self.looked) and not trouble.sure:
                trouble = Trouble("busy", trouble.reason)
            elif self.signs.are_bad:  # two kinds of evidence are as good as two looks
                trouble.sure = True
            self.health.is_troubled(trouble, time())
        else:
            self.health.is_well(time())
            self.was_up = True
        self.looked = monotonic()
        self.check_patience(patience)
        self.pool.prune()

    def note_fault(self):
        """A request ended with an error of the engine's own: is it still there?"""
        self.signs.ailed = monotonic()
        self.look_due.set()

    def ask_models(self):
        """The entries of its list of models. Raises Trouble."""
        if not self.signs.are_good_since(self.looked, self.pulse.told):  # it would say no more
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
            if self.is_ours and not self.was_up:
                raise Trouble("loading", "it is being started") from None
            word = "busy" if error.ours else "off"
            raise Trouble(word, error.reason, error.sure) from None
        except Silent:
            reason = f"it has not answered {path} within {LOOK_TIMEOUT} s"
            raise Trouble("busy", reason) from None
        except BadAnswer as error:
            reason = f"{path}: {error.message}: is it an OpenAI server?"
            raise Trouble("misconfigured", reason) from None
        except Refusal as error:  # one with too much to do may close it, too
            word = "off" if self.signs.are_missing else "busy"
            # What follows in the message is advice for a client.
            raise Trouble(word, f"{path}: {error.message.partition(';')[0]}") from None

    def note_models(self, served):
        kind = kind_of(served[0])
        changed = kind is not self.kind or ids_of(served) != ids_of(self.listed)
        if changed or not self.health.answers:  # it may be another one under the same name
            self.purpose_due = PURPOSE_LOOKS
        self.listed = served
        self.kind = kind
        if self.purpose_due:
            self.ask_purpose()
        self.resting = frozenset(entry["id"] for entry in served if not self.kind.is_loaded(entry))

    def ask_purpose(self):
        """Ask what its models are for. It may be in vain; then the next look does."""
        self.purpose_due -= 1
        with suppress(Silent, Refusal):
            self.purpose = self.kind.purpose(lambda path: self.get(path)[0])
            self.purpose_due = 0

    def check_patience(self, patience):
        """One that takes connections, answers no look for so many seconds, and is at work on
        nothing of ours, will not answer requests either; but who knows of one without figures."""
        if self.health.word != "busy":
            self.answered = self.looked
        lasts = self.looked - self.answered
        idle = self.pulse.figures and not self.pulse.owing()
        if idle and lasts >= patience and not self.figures():
            self.health.note("stuck", f"it has answered nothing for {lasts:.0f} s", time())

    def death(self):
        """The Off of one where nothing listens any more, or None."""
        for _ in range(LAST_LOOKS):
            try:
                self.get("/health", LAST_LOOK)
            except Off as error:
                return error if error.sure else None
            except Silent:
                return None
            except Refusal:  # it closes connections: perhaps all of them, one after the other
                gevent.sleep(LAST_PAUSE)
            else:
                return None
        return None

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
        """Whether it answers a canary, which is a POST, within so many seconds."""
        try:
            with Timeout(seconds, Silent):
                answer = self.looks.post(path, [orjson.dumps(body)], self.headers, harmless=True)
            return works(*whole(answer, seconds, MAX_LIST))
        except (Silent, Refusal):
            return False

    def get_to_know(self):
        """Ask about each model once it is loaded, beside the looks if that takes its time."""
        fresh = not self.health.answers  # it may have been started again since
        found = {}
        by_name = {}
        due = []
        for _, entries in groups_of(self):
            weights = self.kind.weights_of(entries[0])
            base = by_name.get(self.kind.base_of(entries[0]))
            if self.kind.is_loaded(entries[0]):
                one = found[weights] = base or self.found.get(weights) or Found()
                by_name |= dict.fromkeys(ids_of(entries), one)
                one.due = 0 if fresh else one.due
                if not base and one.is_due():
                    due.append((one, entries[0]["id"]))
            elif weights in self.found:  # whoever has it loaded again needs to know its template
                found[weights] = self.found[weights]
                found[weights].due = 0
        self.found = found
        if due and self.purpose == "chat" and not self.asking:
            self.asking = gevent.spawn(self.ask_about, due)
            self.asking.join(ASK_PATIENCE)
            if self.asking:  # another look will take up what is found
                self.asking.link(lambda _: self.look_due.set())

    def ask_about(self, due):
        """Ask about models, each as (its Found, the engine's name for it)."""
        try:
            with Timeout(ASK_TIMEOUT, False):
                for found, model_id in due:
                    found.ask(self.kind, self.question, model_id)
        except Exception as error:  # whatever an engine says: the next time may do better
            words = "engine %s was asked about a model in vain: %s"
            logger.info(words, self.url, type(error).__name__)
        finally:
            self.asking = None

    # -- questions

    def question(self, path, question=None):
        """(status, body) of the answer to a question about a model: a POST, or without one a GET.
        Raises Silent, Refusal."""
        if question is None:
            return self.get(path)
        answer = self.pool.post(path, [orjson.dumps(question)], self.headers, harmless=True)
        return whole(answer, LOOK_TIMEOUT, MAX_TOLD, reuse=True)

    def figures(self):
        """Its kinds.Figures, or None where it does not say."""
        try:
            return self.kind.progress(self.ask_progress) or NO_FIGURES
        except (Silent, Refusal):
            return None

    def ask_progress(self, path):
        """(status, body) of a GET; none of a page that is too large. Raises Silent, Refusal, for an
        engine in trouble too."""
        try:
            status, page = self.get(path, PROGRESS_TIMEOUT, MAX_PAGE)
        except BadAnswer:
            return 0, b""
        if status >= 500 and status != NOT_IMPLEMENTED:
            raise Silent
        return status, page

    def get(self, path, seconds=None, most=MAX_LIST):
        """(status, body) of a GET, within so many seconds and bytes. Raises Silent, Refusal."""
        seconds = seconds or LOOK_TIMEOUT
        late = Off("the engine does not answer", "unreachable: it takes no connection")
        if self.looks.tls:
            late.reason = "TLS: no connection came about: does it speak https at all?"
            if self.listed and not self.signs.are_missing:  # it did, and has much to do by now
                late = Silent
        with Timeout(seconds, late):  # the name's look-up included
            answer = self.looks.get(path, self.headers)
        return whole(answer, seconds, most)

    def post(self, path, body):
        """The body of the answer to a question; b"" if it is no 200. Raises Silent, Refusal."""
        answer = self.pool.post(path, body, self.headers, harmless=True)
        status, data = whole(answer, COUNT_TIMEOUT, MAX_COUNT, reuse=True)
        return data if status == 200 else b""


def whole(answer, seconds, most, reuse=False):
    """(status, body) of an Answer that is still to come, within so many seconds and bytes. Raises
    Silent, Refusal.

    reuse  its connection may serve again
    """
    try:
        body = answer.all(seconds, most)
        return answer.status, body  # which is known by then
    finally:
        answer.close(reuse and answer.ended)
