"""JSON schemas without $ref, for chat templates that print a schema's fields and follow no $ref.

Source: JSON Schema draft 2020-12; RFC 6901 (JSON pointers).
"""

from values import dumps

DEEPEST = 16  # levels of $ref in each other
MOST = 1 << 17  # bytes of JSON that inlining may add to a schema
MOST_IN_ALL = 1 << 19  # to all of a request
DEFINITIONS = ("$ref", "$defs", "definitions")  # what is left out of a schema that is inlined


class Schemas:
    """Those of a request, which share what inlining may add.

    left   bytes of it
    """

    def __init__(self):
        self.left = MOST_IN_ALL

    def inlined(self, schema):
        """A schema with what its local $refs mean in their places; an endless one stays as it
        is."""
        inliner = Inliner(schema, min(MOST, self.left))
        try:
            return inliner.copy(schema, ())
        except (OverflowError, RecursionError):
            return schema
        finally:
            self.left -= inliner.made


class Inliner:
    """Copies parts of a schema, references replaced. `within`: the $refs that led to a part.

    Raises OverflowError once that makes too much.

    made   bytes of JSON that were put in the places of references
    meant  $ref -> what it means, and how many bytes that has
    """

    def __init__(self, root, most):
        self.root = root
        self.most = most
        self.made = 0
        self.meant = {}

    def copy(self, value, within):
        """A copy of a schema, or of anything else inside one."""
        if not isinstance(value, (dict, list)):
            return value
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
        if self.made > self.most or len(within) == DEEPEST:
            raise OverflowError
        return {**self.copy(meant, (*within, ref)), **rest}

    def copy_properties(self, properties, within):
        """Properties, whose names are no keywords."""
        if not isinstance(properties, dict):
            return properties
        return {name: self.copy(inner, within) for name, inner in properties.items()}

    def keep_data(self, value, within):
        """What an instance may be, which is no schema."""
        return value

    def target(self, ref):
        """What a local $ref means, or None. What is found will be copied: its bytes are added."""
        if ref not in self.meant:
            found = self.found(ref)
            self.meant[ref] = (found, len(dumps(found)))
        found, size = self.meant[ref]
        self.made += size
        return found

    def found(self, ref):
        """What stands at a JSON pointer, or None."""
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
