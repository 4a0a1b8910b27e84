"""JSON that keeps to no schema: engines and clients leave a field out, give null, or another type.

Here such a field counts as absent.
"""

# Fields of an answer that some engines give as null, which OpenAI's schema forbids, or did lately.
NEVER_NULL = ("service_tier", "system_fingerprint", "usage")


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


def fit_nulls(answer):
    """Take the nulls out of an engine's plain answer that OpenAI's schema forbids, in place."""
    drop_nulls(answer, NEVER_NULL)
    drop_nulls(as_dict(answer.get("usage")))
