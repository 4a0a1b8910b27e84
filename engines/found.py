"""What an engine has told of one of its models, once for each load. Pure.

It stays one object while the engine is known: an engine.Engine keeps it, each models.Model has it.
"""

from dataclasses import dataclass

from engines.kinds import Unasked
from engines.template import ASKED_IN, Unclear, opens_thoughts, table_of
from reasoning import Table
from values import as_dict

PAUSE = 12  # looks after which a question that went wrong is asked again
ENOUGH = 5  # answers without cached tokens in their usage, after which it has none


@dataclass
class Found:
    """
    table          reasoning.Table of its template; None: it could not be asked
    opens          whether a prompt ends in an opened <think>; None: nobody has said
    context        tokens of a request with its answer, or None
    bytes_a_token  of a text in English, or None
    capacity       tokens that the engine's cache holds, or None
    caches         whether it keeps what it has read, for a prompt that begins alike
    names_cached   whether its usage says how many tokens were cached; None: that is not known yet
    due            looks until it is asked again; None: it is known
    """

    table: Table | None = None
    opens: bool | None = None
    context: int | None = None
    bytes_a_token: float | None = None
    capacity: int | None = None
    caches: bool = True
    names_cached: bool | None = None
    due: int | None = 0
    answers: int = 0

    def is_due(self):
        """Whether it is to be asked now. Called once a look."""
        if self.due:
            self.due -= 1
        return self.due == 0

    def ask(self, kind, ask, model_id):
        """Ask a Kind of engine all this.

        ask  a function: (path, a question as a dict, or None for a GET) -> (status, body)
        """
        self.due = PAUSE  # should anything be raised

        def prompt(**question):
            return kind.prompt(ask, {"model": model_id, **question})

        try:
            self.table = table_of(prompt, kind.effort_is_field)
            self.opens = opens_thoughts(prompt(messages=ASKED_IN))
        except (Unasked, Unclear):
            return
        for name, value in kind.facts(ask, model_id).items():
            setattr(self, name, value)
        self.due = None

    def note_usage(self, usage):
        """Look whether an answer's usage names cached tokens."""
        if self.names_cached:
            return
        details = as_dict(as_dict(usage).get("prompt_tokens_details"))
        self.answers += 1
        if isinstance(details.get("cached_tokens"), int):
            self.names_cached = True
        elif self.answers >= ENOUGH:
            self.names_cached = False
