"""The engine's side of the wire."""
