"""The embedded engines: llama.cpp and the small models that `./run.sh --local` serves with it."""
