"""JSON that keeps to no schema: engines and clients leave a field out, give null, or another type.

Here such a field counts as absent.
"""


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
