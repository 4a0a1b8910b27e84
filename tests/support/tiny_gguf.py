"""A tiny GGUF with random weights, and llama.cpp's own server on it, for tests where only the wire format matters.

    tiny_gguf.py OUT.gguf                   write the model (needs gguf and numpy)
    tiny_gguf.py OUT.gguf --serve PORT      the same, then serve it as `tiny` on 127.0.0.1:PORT (needs xllamacpp)

The model is a llama with a byte-level vocabulary. It babbles lower-case letters and spaces and never ends a turn by
itself: only a grammar (JSON schema, tool call), `stop` or `max_tokens` ends it. Its chat template is ChatML with tools
and, where `chat_template_kwargs.enable_thinking` is true, reasoning.

Good to know: `tool_choice: "required"` is not enforced from the start of a reply, only once a call has begun, and the
model begins none. Begin it with an assistant message "<tool_call>\\n" at the end of `messages`, and give some 100
tokens, and a maxLength to the strings of the schema. `"parallel_tool_calls": false` with `"stop": ["</tool_call>"]`
makes it one call.
"""
import argparse
import os
import signal
import threading
from pathlib import Path

import gguf
import numpy as np

WIDTH, LAYERS, SEED = 64, 2, 0
HEADS, KV_HEADS = 4, 2
CONTEXT = 4096
PAIRS = ["th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "ou", "ll", "lo"]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

TEMPLATE = r"""
{%- if tools -%}
  {{- '<|im_start|>system\nTools:\n' -}}
  {%- for t in tools -%}{{- (t.function or t) | tojson ~ '\n' -}}{%- endfor -%}
  {{- 'A call looks like this:\n<tool_call>\n{"name": "tool", "arguments": {}}\n</tool_call><|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\n' -}}
  {%- if m.reasoning_content -%}{{- '<think>\n' ~ m.reasoning_content ~ '\n</think>\n' -}}{%- endif -%}
  {%- if m.content is string -%}
    {{- m.content -}}
  {%- elif m.content -%}
    {%- for part in m.content -%}{{- part.text or '' -}}{%- endfor -%}
  {%- endif -%}
  {%- for c in m.tool_calls or [] -%}
    {%- set f = c.function or c -%}
    {{- '<tool_call>\n{"name": ' ~ f.name | tojson ~ ', "arguments": ' -}}
    {{- f.arguments if f.arguments is string else f.arguments | tojson -}}
    {{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\n' ~ ('<think>\n' if enable_thinking is defined and enable_thinking is true else '') -}}
{%- endif -%}
""".lstrip()


def byte_alphabet():
    """The printable stand-in for each byte in byte-level BPE vocabularies (GPT-2's table)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep}
    for n, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + n)
    return table


def vocabulary():
    """Tokens and their types: bytes, some pairs of letters, control tokens, tags, padding."""
    table = byte_alphabet()
    tokens = [(table[b], gguf.TokenType.NORMAL) for b in range(256)]
    tokens += [(p, gguf.TokenType.NORMAL) for p in PAIRS]
    tokens += [(c, gguf.TokenType.CONTROL) for c in CONTROL]
    tokens += [(t, gguf.TokenType.USER_DEFINED) for t in TAGS]
    while len(tokens) % 32:
        tokens.append((f"<|spare_{len(tokens)}|>", gguf.TokenType.UNUSED))
    return [t for t, _ in tokens], [kind for _, kind in tokens]


def write(path, width=WIDTH, layers=LAYERS, seed=SEED, template=TEMPLATE):
    tokens, types = vocabulary()
    token_id = {t: i for i, t in enumerate(tokens)}

    w = gguf.GGUFWriter(path, "llama")
    w.add_name("tiny-random")
    w.add_license("cc0-1.0")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(width)
    w.add_block_count(layers)
    w.add_feed_forward_length(4 * width)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(width // HEADS)
    w.add_rope_freq_base(10000.0)
    w.add_vocab_size(len(tokens))
    w.add_file_type(gguf.LlamaFileType.MOSTLY_F16)

    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([f"{a} {b}" for a, b in PAIRS])
    w.add_bos_token_id(token_id["<|endoftext|>"])
    w.add_eos_token_id(token_id["<|im_end|>"])
    w.add_pad_token_id(token_id["<|endoftext|>"])
    w.add_add_bos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(template)

    rng = np.random.default_rng(seed)
    rand = lambda *shape: (rng.standard_normal(shape) * 0.05).astype(np.float32)
    half = lambda t: t.astype(np.float16)
    ones = np.ones(width, np.float32)
    # All embeddings share one direction, the layers add little to it, and the output rows of letters and the space
    # point along it.
    direction = rand(width)
    direction /= np.linalg.norm(direction)
    embed = rand(len(tokens), width) + 0.5 * direction
    output = rand(len(tokens), width)
    output[[token_id[c] for c in "abcdefghijklmnopqrstuvwxyz" + byte_alphabet()[32]]] += 2 * direction

    w.add_tensor("token_embd.weight", half(embed))
    w.add_tensor("output_norm.weight", ones)
    w.add_tensor("output.weight", half(output))
    kv = width // HEADS * KV_HEADS
    for n in range(layers):
        shapes = {"attn_q": (width, width), "attn_k": (kv, width), "attn_v": (kv, width),
                  "attn_output": (width, width), "ffn_gate": (4 * width, width), "ffn_up": (4 * width, width),
                  "ffn_down": (width, 4 * width)}
        w.add_tensor(f"blk.{n}.attn_norm.weight", ones)
        w.add_tensor(f"blk.{n}.ffn_norm.weight", ones)
        for name, shape in shapes.items():
            scale = 0.2 if name in ("attn_output", "ffn_down") else 1.0
            w.add_tensor(f"blk.{n}.{name}.weight", half(scale * rand(*shape)))

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def serve(path, port, context, slots):
    """llama.cpp's HTTP server until SIGTERM; /health answers 200 once the model is loaded."""
    # Waiting OpenMP threads spin by default and hold each other up where other processes want the cores. Must be set
    # before the library loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path, p.model_alias = str(path), {"tiny"}
    p.hostnames, p.port = ["127.0.0.1"], port
    p.n_ctx, p.n_parallel, p.kv_unified = context, slots, False         # context is shared out among the slots
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1         # a second one gains nothing for so small a model
    p.endpoint_metrics = p.endpoint_slots = True
    p.ui, p.offline = False, True
    p.enable_reasoning = 0          # enable_thinking for requests that don't set it; llama.cpp's own default is 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = xllamacpp.Server(p)
    stop.wait()
    del server


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--serve", type=int, metavar="PORT")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--template", metavar="FILE", type=Path, help="another chat template, in Jinja")
    arguments = parser.parse_args()
    write(arguments.out, template=arguments.template.read_text(encoding="utf-8") if arguments.template else TEMPLATE)
    if arguments.serve:
        serve(arguments.out, arguments.serve, CONTEXT * arguments.slots, arguments.slots)


if __name__ == "__main__":
    main()
