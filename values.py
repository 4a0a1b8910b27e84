"""JSON that keeps to no schema: engines and clients leave a field out, give null, or another type.

Here such a field counts as absent.
"""

import json

import orjson


def loads(data):
    """An engine's JSON (bytes) as a value. Takes what Python's own reader takes, such as NaN, and
    replaces bad UTF-8. Raises ValueError, or RecursionError."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data.decode("utf-8", "replace"))


def dumps(value):
    """A value as JSON (bytes). A lone surrogate, half a character that an engine has cut in two,
    stays as an escape."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def is_utf8(data):
    """Whether bytes are UTF-8."""
    if data.isascii():
        return True
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def as_id(value):
    """A value that can name something, or None."""
    return value if isinstance(value, (str, int)) else None


def as_dict(value):
    """The value if it is an object, else an empty one."""
    if isinstance(value, dict):
        return value
    return {}


def as_list(value):
    """The value if it is a list, else an empty one."""
    if isinstance(value, list):
        return value
    return []


def object_in(table, name):
    """A field that should be an object; an empty one where it is anything else."""
    return as_dict(table.get(name))


def objects_in(table, name):
    """The objects of a field that should be a list of them; none where it is anything else."""
    return [value for value in as_list(table.get(name)) if isinstance(value, dict)]


def figure(table, name, otherwise=None):
    """A number of tokens in a table of an engine's usage, or `otherwise` where it says none."""
    value = as_dict(table).get(name)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return otherwise


def drop_nulls(table, names=None):
    """Take the fields that are null out of a dict, in place: all of them, or those of `names`."""
    for name in names or list(table):
        if table.get(name, "") is None:
            del table[name]
