"""The tool calls of an engine's answer, told apart and mended."""

import re

import steps
from errors import UpstreamError
from values import as_id, object_in

# What is odd about a call, see mending/answer.py.
NO_NAME = "call_without_name"
SAME_ID = "calls_of_one_id"
NO_OBJECT = "arguments_not_object"
MOST_CALLS = 5000  # of an answer: no model means more

MARK = re.compile(r'["\\{}\[\]]')
# The inside of a string, up to its end or to half an escape.
INSIDE = re.compile(r'(?:[^"\\]++|\\.)*+', re.S)
# The fields of a piece of a call, and of its function, that are read here; the others go on.
CALL_FIELDS = ("index", "id", "type", "function")
FUNCTION_FIELDS = ("name", "arguments")


def arguments_text(value):
    """A piece of a tool call's arguments as a text; some engines give an object instead."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return steps.joined(value).decode()


def call_id(value):
    """An engine's id of a call as a text, or None where it is none."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    return str(value) or None


def without(table, names):
    return {name: value for name, value in table.items() if name not in names}


class ObjectEnd:
    """Finds the end of a JSON object (or list) that arrives in pieces."""

    def __init__(self):
        self.depth = 0  # brackets that are open
        self.deepest = 0  # how many have been at once
        self.in_string = False
        self.escaping = False  # the last piece ended with a backslash
        self.reached = False

    def cut(self, text):
        """As much of the text as belongs to the object."""
        if self.reached or not text:
            return ""
        if self.in_string and not self.escaping and '"' not in text and "\\" not in text:
            return text
        at = int(self.escaping)
        self.escaping = False
        while True:
            steps.pause()
            if self.in_string:
                at = self.string_end(text, at)
                if self.in_string:
                    return text
            found = MARK.search(text, at, at + steps.LARGE)
            if not found:
                at += steps.LARGE
                if at >= len(text):
                    return text
                continue
            at = found.end()
            if found[0] == '"':
                self.in_string = True
            elif found[0] == "\\":
                self.escaping = at == len(text)
                at += 1
            else:
                self.depth += 1 if found[0] in "{[" else -1
                self.deepest = max(self.deepest, self.depth)
                if not self.depth:
                    self.reached = True
                    return text[:at]

    def string_end(self, text, at):
        """The place behind the string that is open, or behind the text."""
        end = at
        while end < len(text):
            steps.pause()
            at = INSIDE.match(text, end, end + steps.LARGE).end()
            if text.startswith('"', at):
                self.in_string = False
                return at + 1
            if at == len(text) - 1:
                self.escaping = True
                return len(text)
            end = at
        return end


class ToolCall:
    """A tool call as it comes from the engine.

    id         the engine's; then the client's
    name       "" while it is not known
    index      the true one; None until the client hears of it, which takes a name
    indexed    the engine has given an index too
    arguments  the pieces of their text
    blank      white space that may stand before them
    end        finds their end, where it can be found
    whole      that has come
    first      the piece that begins it, while its name can still go on
    """

    def __init__(self, ident):
        self.id = ident
        self.name = ""
        self.index = None
        self.indexed = False
        self.arguments = []
        self.blank = []
        self.end = None
        self.whole = False
        self.first = None

    def take(self, text):
        """As much of a piece of text as belongs to the arguments. White space waits for more."""
        if not self.arguments:
            if not text.strip():
                self.blank.append(text)
                return ""
            text = "".join(self.blank) + text
            if text.lstrip()[0] in '{["':
                self.end = ObjectEnd()
        if self.end:
            text = self.cut(text)
        if text:
            self.arguments.append(text)
        return text

    def cut(self, text):
        """A piece of an object up to the object's end. After an empty one more is taken: some
        engines say {} before they know better."""
        cut = self.end.cut(text)
        self.whole = self.end.reached
        if self.whole and cut and "".join([*self.arguments, cut]).split() == ["{}"]:
            self.end = None
            return text
        return cut

    def is_followed(self, name, text):
        """Whether a piece of the same id or index, with this name and this text of arguments,
        belongs to another call."""
        if not name or not self.name:
            return False
        if self.index is not None and self.first is None and name != self.name:
            return True
        return self.whole and text.lstrip().startswith("{")

    @property
    def cut_short(self):
        """Whether the arguments have begun and not ended."""
        end = self.end
        return bool(end and not end.reached and (end.depth > 0 or end.in_string))

    @property
    def is_object(self):
        try:
            value = steps.read("".join(self.arguments).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            return False
        return isinstance(value, dict)


class ToolCalls:
    """The tool calls of one choice, told apart and mended: each has an id of its own (a text), a
    name that is whole, and arguments that end where their object ends. Engines forget the index,
    use one index for two calls, or repeat id and name with each piece, which the SDKs would join
    to one long id; they say the name in pieces, or after the arguments, or never.

    calls             all of them, in the order in which they came
    by_id, by_index   an engine's id, an engine's index -> its call
    """

    def __init__(self, oddities, fresh):
        """
        oddities  a set, to which what is odd is added
        fresh     a list, to which calls are added that have begun, and whose names can still go on
        """
        self.oddities = oddities
        self.fresh = fresh
        self.renamed = False  # a name has gone on
        self.calls = []
        self.begun = 0
        self.judged = 0  # how many of them have ended
        self.cut_short = False  # one of these is not all there: a tool would run on half its input
        self.by_id = {}
        self.by_index = {}

    def take(self, piece, completion_id):
        """What the client gets for a piece of a call: a dict, or None where that is nothing."""
        call = self.going_on(piece)
        if call is not None:
            given = piece["function"]["arguments"]
            text = call.take(given)
            if text == given:
                return piece
            return {**piece, "function": {"arguments": text}} if text else None
        return self.take_any(piece, completion_id)

    def going_on(self, piece):
        """The call that has begun and that a piece of arguments alone goes on with, as most pieces
        do; else None."""
        function = piece.get("function")
        if len(piece) != 2 or not isinstance(function, dict) or len(function) != 1:
            return None
        index = piece.get("index")
        call = self.by_index.get(index) if type(index) is int else None
        if call is None or call.index != index or call.first is not None:
            return None
        return call if isinstance(function.get("arguments"), str) else None

    def take_any(self, piece, completion_id):
        """The same of a piece of which nothing is known."""
        function = object_in(piece, "function")
        name = name_in(function)
        text = arguments_text(function.get("arguments"))
        engine_index = as_id(piece.get("index"))
        engine_id = call_id(piece.get("id"))
        call = self.known(engine_index, engine_id, name, text) or self.open(engine_id)
        if engine_index is not None:
            self.by_index[engine_index] = call
            call.indexed = True
        if call.index is None:
            return self.take_early(call, piece, completion_id)
        if call.first is not None and name not in ("", call.name):
            call.name += name
            call.first["function"]["name"] = call.name
            self.renamed = True
        text = call.take(text)
        if text:
            call.first = None
        if not (text or without(piece, CALL_FIELDS) or without(function, FUNCTION_FIELDS)):
            return None
        more = {**without(piece, ("id",)), "index": call.index}
        if more.get("type") != "function":
            more.pop("type", None)
        more["function"] = {**without(function, ("name",)), "arguments": text}
        return more

    def take_early(self, call, piece, completion_id):
        """The same of a call that has not begun. Its name may come after its arguments."""
        function = object_in(piece, "function")
        early = bool(call.arguments)
        text = call.take(arguments_text(function.get("arguments")))
        call.name = name_in(function)
        if not call.id:
            self.name_by(call, call_id(piece.get("id")))
        if not call.name:
            return None
        first = self.begin(call, piece, completion_id)
        if early or not text:
            call.first = first
            self.fresh.append(call)
        return first

    def known(self, engine_index, engine_id, name, text):
        """The call that a piece goes on with, or None if it begins one."""
        call = self.by_id.get(engine_id)
        if call is not None:
            new_index = engine_index is not None and engine_index not in self.by_index
            if new_index and call.indexed:  # some engines give several calls one id
                return None
            return None if call.is_followed(name, text) else call
        if engine_index is not None:
            call = self.by_index.get(engine_index)
            if call is None or call.is_followed(name, text):
                return None
            new_id = engine_id is not None and engine_id not in self.by_id
            return None if new_id and name and (call.id or call.arguments) else call
        if not self.calls or name and (engine_id or self.calls[-1].name):
            return None
        return self.calls[-1]

    def open(self, engine_id):
        """A new call. Raises UpstreamError where there are too many."""
        if len(self.calls) >= MOST_CALLS:
            raise UpstreamError(f"the engine's answer calls more than {MOST_CALLS:,} tools")
        call = ToolCall(None)
        self.calls.append(call)
        self.name_by(call, engine_id)
        return call

    def name_by(self, call, engine_id):
        """Give a call the engine's id, unless that is another one's."""
        if engine_id is None:
            return
        if engine_id in self.by_id:
            self.oddities.add(SAME_ID)
            self.by_id[engine_id] = None  # it tells no calls apart any more
            return
        call.id = engine_id
        self.by_id[engine_id] = call

    def begin(self, call, piece, completion_id):
        """The first piece for the client. Without an id it could not send the result back."""
        call.index = self.begun
        self.begun += 1
        if not call.id:
            call.id = f"call_{completion_id}_{call.index}"
            while call.id in self.by_id:
                call.id += "_"
            self.by_id[call.id] = call
        function = {**object_in(piece, "function"), "name": call.name}
        if call.arguments or "arguments" in function:
            function["arguments"] = "".join(call.arguments)
        return {
            **piece,
            "index": call.index,
            "id": call.id,
            "type": "function",
            "function": function,
        }

    def whole(self, pieces, completion_id, cut):
        """The calls of a whole message (dicts), of which each piece is one.

        cut  whether the message was cut off, so that a call's arguments may not have begun
        """
        out = []
        for piece in steps.paced(pieces):
            function = object_in(piece, "function")
            call = self.open(call_id(piece.get("id")))
            call.take(arguments_text(function.get("arguments")))
            call.name = name_in(function)
            if call.name:
                if not call.arguments and not cut:
                    call.arguments.append("{}")
                piece = {**piece, "function": {"arguments": "", **function}}
                out.append(without(self.begin(call, piece, completion_id), ("index",)))
        self.judge()
        return out

    def close(self):
        """The last pieces, as a whole choice ends: SDKs cannot read arguments that are empty."""
        out = []
        for call in self.calls[self.judged :]:
            if call.index is not None and not call.arguments:
                call.arguments.append("{}")
                out.append({"index": call.index, "function": {"arguments": "{}"}})
        return out

    def judge(self):
        """Look at the calls that have ended."""
        for call in steps.paced(self.calls[self.judged :]):
            if call.index is None:
                self.oddities.add(NO_NAME)
            elif call.cut_short:
                self.cut_short = True
            elif call.arguments and not call.is_object:
                self.oddities.add(NO_OBJECT)
        self.judged = len(self.calls)


def name_in(function):
    """The name in a function, or "" where it has none."""
    name = function.get("name")
    return name if isinstance(name, str) else ""
