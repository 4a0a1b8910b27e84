"""An engine's answer, and what engines get wrong in it: put right once, for all dialects."""
