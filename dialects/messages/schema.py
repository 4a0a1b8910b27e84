"""JSON schemas without $ref, for chat templates that print a schema's fields and follow no $ref.

Source: JSON Schema draft 2020-12; RFC 6901 (JSON pointers).
"""

DEEPEST = 16  # levels of $ref in each other
MOST_VALUES = 20_000  # that inlining may make
DEFINITIONS = ("$ref", "$defs", "definitions")  # what is left out of a schema that is inlined


def inlined(schema):
    """A schema with what its local $refs mean in their places; an endless one stays as it is."""
    try:
        return Inliner(schema).copy(schema, ())
    except (OverflowError, RecursionError):
        return schema


class Inliner:
    """Copies parts of a schema, references replaced. `within`: the $refs that led to a part.

    Raises OverflowError once that makes too much.
    """

    def __init__(self, root):
        self.root = root
        self.made = 0

    def copy(self, value, within):
        """A copy of a schema, or of anything else inside one."""
        if not isinstance(value, (dict, list)):
            return value
        self.count(value, within)
        if isinstance(value, list):
            return [self.copy(item, within) for item in value]
        rest = {}
        for name, inner in value.items():
            if name not in DEFINITIONS:
                rest[name] = KEYWORDS.get(name, Inliner.copy)(self, inner, within)
        return self.resolved(value, rest, within)

    def resolved(self, schema, rest, within):
        """A copy's fields (`rest`) together with what its $ref means."""
        if "$ref" not in schema:
            return rest
        ref = schema["$ref"]
        if not isinstance(ref, str):
            return {**rest, "$ref": ref}
        if ref in within:  # a schema that holds itself: from here on anything fits
            return rest
        meant = self.target(ref)
        if meant is None:
            return {**rest, "$ref": ref}
        return {**self.copy(meant, (*within, ref)), **rest}

    def copy_properties(self, properties, within):
        """Properties, whose names are no keywords."""
        if not isinstance(properties, dict):
            return properties
        return {name: self.copy(inner, within) for name, inner in properties.items()}

    def keep_data(self, value, within):
        """What an instance may be, which is no schema: only its size matters."""
        inners = value
        if isinstance(value, dict):
            inners = value.values()
        elif not isinstance(value, list):
            return value
        self.count(value, within)
        for inner in inners:
            self.keep_data(inner, within)
        return value

    def count(self, value, within):
        self.made += 1 + len(value)
        if self.made > MOST_VALUES or len(within) > DEEPEST:
            raise OverflowError

    def target(self, ref):
        """What a local $ref (a JSON pointer) means, or None."""
        if not ref.startswith("#"):
            return None
        here = self.root
        for step in ref[1:].split("/")[1:]:
            if not isinstance(here, dict):
                return None
            here = here.get(step.replace("~1", "/").replace("~0", "~"))
        return here if isinstance(here, dict) else None


# Keywords whose value is no schema, and how it is copied.
KEYWORDS = {
    **dict.fromkeys(("properties", "patternProperties"), Inliner.copy_properties),
    **dict.fromkeys(("const", "enum", "default", "examples"), Inliner.keep_data),
}
