"""The gate without each of its parts."""

PARTS = {}
VARIANTS = {}
TELLING = ("freeze", "abuse", "thrash", "batch", "office", "overcommit")  # traces
