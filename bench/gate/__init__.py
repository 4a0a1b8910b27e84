"""What a gate does for people, by simulation: python -m bench.gate --help.

README.md here is the reading guide.

__main__     the command
hardware     how fast an engine is, and its flags
engine       vLLM's V1 scheduler and its KV cache
world        time, requests, and what becomes of them
traces       who sends what, and when
policies     today's gate, the new one, none
figures      what became of the requests -> numbers -> a table, beside the targets
calibration  published figures, and what the model makes of them
ablation     the gate without each of its parts
runs         many simulations at once
"""
