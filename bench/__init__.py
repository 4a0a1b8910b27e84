"""What the gateway costs, beside nginx and the engine itself: ./run.sh bench.

README.md here is the reading guide.

__main__    the command: what is measured, in which order, what is missing
stage       starts and ends what is measured: engine, nginx, gateway, other gateways
load        requests, and the load generator that sends them
measures    one run against one target -> numbers
whole       whether anything of a stream is lost
figures     numbers -> the table, beside the bars
machine     cores, priority, and what processes use
gate        the gate alone, by simulation: python -m bench.gate
"""
