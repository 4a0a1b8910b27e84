"""A tiny model in the shape of GLM-4-MoE whose replies are known beforehand, for tests with real vLLM.

    tiny_glm.py OUT          (needs torch and safetensors: the environment of vllm_cpu.sh has both)

How it works: the weights are made by hand and act as a table of bigrams. Every token has a hidden dimension of its
own, so the output matrix can say "after this token, that one". The chat template ends each prompt with a token that
names a script, <|mode_NAME|>; one attention head copies the name to every later position, where it raises the tokens
owned by that script. Nothing is faked at request time: reasoning, text, tool calls and ends of turn all come out of
the model, token by token, through vLLM's own parsers.

The template picks the script: chat_template_kwargs.script, else "after" where tool results came since the last reply,
else @NAME as a word of the last user message, else "tool" where the request has tools, else "chat".

    chat        random words, different each time; with temperature 0 each word of the list once
    short       "Yes indeed"
    answer      ANSWER below, word for word
    long        an endless reply                        noend   endless reasoning
    json        {"city": "Paris", "temp": 21}           utf     characters cut across tokens
    tool        a sentence, then get_weather            tool2   two calls to get_weather
    tooldirect  get_time right after the reasoning      toolthink   get_time from inside the reasoning
    after       what to say about tool results

Good to know:
- Only `chat`, `long` and `noend` are random; the rest is the same each time, at any temperature. But how many tokens
  share a streamed chunk depends on the load, so don't count chunks.
- The tool calls are get_weather and get_time whatever tools the request offers. With a script set by
  chat_template_kwargs, tool results don't lead to `after`: `tool` then calls tools for ever.
- `json` fits a schema with the fields city and temp. Others are obeyed, but between their tokens the model likes white
  space, so give max_tokens.
- One byte of prompt is one token. Prompts are cached in blocks of 128 tokens: cached_tokens is a multiple of it.
- reasoning_effort adds a line to the prompt, and "none" also turns thinking off; /tokenize knows it only inside
  chat_template_kwargs. A thinking budget is thinking_token_budget.
"""
import json
import math
import sys
from pathlib import Path

ANSWER = ["The test", " password", " is", " PINE", "APPLE-", "4711."]

# ---- vocabulary

SPECIAL = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<tool_response>", "</tool_response>", "<tools>", "</tools>"]
SCRIPTS = ["chat", "short", "answer", "long", "noend", "json", "utf", "tool", "tool2", "tooldirect", "toolthink",
           "after"]
MODES = SCRIPTS + ["tool2b"]         # tool2b: the second call of tool2, never asked for by name
MODE_TOKENS = [f"<|mode_{m}|>" for m in MODES]
END_OF_TURN = "<|user|>"             # GLM ends a turn by starting the next one
END_OF_CALLS = "<|observation|>"
SWITCH = "\n \n"                     # stands between tool2's calls and turns tool2 into tool2b

# ---- sizes

VOCAB = 640
HIDDEN = 768                         # VOCAB dimensions for tokens, one that is always 1, one per mode, some spare
ONE = VOCAB
FIRST_MODE = VOCAB + 1
HEAD_DIM, HEADS, KV_HEADS = 64, 4, 2
MLP, EXPERT_MLP, EXPERTS = 64, 32, 4

# ---- weights of the bigrams; the final norm multiplies them by SCALE to give logits

SCALE = math.sqrt(HIDDEN / 3)        # 16: a hidden state holds three ones (token, ONE, mode)
STEP = 2.0                           # to a token that one script owns ...
OWNED = 2.0                          # ... which that script raises by this much
SHARED = 4.0                         # to a token of several scripts, e.g. a tag
AFTER_CALL = 3.3                     # to END_OF_CALLS: likely, but less so than SWITCH in tool2
DEFAULT = 0.7                        # makes "chat" win where a prompt names no script (/v1/completions)


def byte_alphabet():
    """The printable stand-in for each byte in byte-level BPE vocabularies (GPT-2's table)."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {b: chr(b) for b in keep}
    for n, b in enumerate(b for b in range(256) if b not in table):
        table[b] = chr(256 + n)
    return table


BYTES = byte_alphabet()


class Bigrams:
    def __init__(self):
        self.vocab = {}
        self.edges = {}                              # (token, next token) -> weight
        self.owned = {mode: set() for mode in MODES}
        for b in range(256):
            self._add(BYTES[b])
        self.shared = {name: self._add(name) for name in SPECIAL + TAGS + MODE_TOKENS}

    def _add(self, name):
        assert name not in self.vocab, name
        self.vocab[name] = len(self.vocab)
        return self.vocab[name]

    def own(self, mode, text):
        """The token for text: a new one, or the byte where text is a single byte."""
        name = "".join(BYTES[b] for b in (text if isinstance(text, bytes) else text.encode()))
        token = self.vocab[name] if len(name) == 1 else self._add(name)
        self.owned[mode].add(token)
        return token

    def path(self, mode, after, pieces):
        """Say pieces one by one when token `after` was said; returns the last one."""
        last = self.shared[after] if isinstance(after, str) else after
        for piece in pieces:
            if piece in self.shared:
                token, weight = self.shared[piece], SHARED
            else:
                token, weight = self.own(mode, piece), STEP
            self.edges[last, token] = weight
            last = token
        return last

    def cloud(self, mode, after, words, end=None, p_end=0.0, extra=0.0):
        """Say words at random, `end` with probability p_end after each; greedily: the list once, then `end`."""
        tokens = [self.own(mode, w) for w in words]
        nat = 1.0 / SCALE
        for i, token in enumerate(tokens):
            self.edges[self.shared[after], token] = STEP + extra + (nat if i == 0 else 0)
            final = i == len(tokens) - 1
            for j, following in enumerate(tokens):
                self.edges[token, following] = STEP + (nat if j == i + 1 else 0)
            if end:
                lift = 3 * nat if final else math.log((len(tokens) - 1 + math.e) * p_end) * nat
                self.edges[token, self.shared[end]] = STEP + OWNED + lift

    def finish(self):
        """A token that leads nowhere (bytes of the prompt, most tags) leads into the reply."""
        assert len(self.vocab) <= VOCAB, len(self.vocab)
        while len(self.vocab) < VOCAB:
            self._add(f"<|spare_{len(self.vocab)}|>")
        reply = {to: w for (token, to), w in self.edges.items() if token == self.shared["</think>"]}
        lead = {token for token, _ in self.edges}
        for token in range(VOCAB):
            if token not in lead:
                self.edges.update({(token, to): w for to, w in reply.items()})


def write_scripts():
    b = Bigrams()
    think = lambda mode, *pieces: b.path(mode, "<think>", [*pieces])
    reply = lambda mode, *pieces: b.path(mode, "</think>", [*pieces])
    call = lambda mode, *pieces: b.path(mode, "<tool_call>", [*pieces, "</tool_call>"])

    b.cloud("chat", "<think>", [" " + w for w in
            "consider perhaps first recall therefore checking weigh maybe since because however compare estimate "
            "assume verify notice suppose hence likely step".split()], "</think>", 0.05, DEFAULT)
    b.cloud("chat", "</think>", [" " + w for w in
            "river stone lantern garden copper winter harbour meadow signal velvet amber thunder pocket ladder mirror "
            "compass orchard kettle marble feather bridge candle".split()], END_OF_TURN, 0.03, DEFAULT)

    think("short", "Ok", "</think>")
    reply("short", "Yes", " indeed", END_OF_TURN)

    think("answer", "They want", " the fixed", " sentence.", "</think>")
    reply("answer", *ANSWER, END_OF_TURN)

    think("long", "Going", " long", "</think>")
    b.cloud("long", "</think>", [" " + w for w in "tick tock hum drone spin orbit pulse wave drift roll".split()])

    b.cloud("noend", "<think>", [" " + w for w in "ponder muse brood reflect mull dwell".split()])
    reply("noend", "Enough", " of that.", END_OF_TURN)       # when a thinking budget stops the reasoning

    think("json", "Form", " an object", "</think>")
    reply("json", '{"', 'city"', ': "Pa', 'ris"', ', "temp"', ": 2", "1}", END_OF_TURN)

    think("utf", "Emo", "ji", "</think>")
    single = lambda text: [bytes([x]) for x in text.encode()]
    reply("utf", "hi ", *single("\U0001F642"), " caf", *single("é"), " 日本", " ok!", END_OF_TURN)

    think("tool", "The user", " wants", " weather", "; I will", " call", " the tool", " now.", "</think>")
    reply("tool", "Let me", " check", " the", " sky", "<tool_call>")
    call("tool", "get_", "weather", "<arg_key>", "city", "</arg_key>", "<arg_value>",
         "Par", "is", ", ", "Île-de-", "France", "</arg_value>")

    # The calls below spell their inner tags with ordinary tokens, cut in awkward places.
    think("tool2", "Two", " cities", " asked", "</think>")
    reply("tool2", "\n\n", "<tool_call>")
    call("tool2", "get_weather", "<arg_key>ci", "ty</arg_", "key><arg_value>Rome", "</arg_val", "ue>")
    b.path("tool2", "</tool_call>", [SWITCH, "<tool_call>"])
    call("tool2b", "get_weather<arg_key>", "city</arg_key><arg_", "value>Oslo</arg_value>")

    think("tooldirect", "No", " words", "</think>")
    b.edges[b.shared["</think>"], b.shared["<tool_call>"]] = STEP
    b.owned["tooldirect"].add(b.shared["<tool_call>"])
    call("tooldirect", "get_time<arg_", "key>tz</arg_key>", "<arg_value>CET</", "arg_value>")

    think("toolthink", "Straight", " from", " thought", "<tool_call>")
    call("toolthink", "get_time<arg_key>", "tz</arg_key><arg_value>", "UTC</arg_value>")

    b.edges[b.shared["</tool_call>"], b.shared[END_OF_CALLS]] = AFTER_CALL

    think("after", "The tool", " said", " something", "</think>")
    reply("after", "It is", " 21", " degrees", " in", " Paris", " today.", END_OF_TURN)

    b.finish()
    return b


# ---- the checkpoint

def weights(b):
    import torch
    noise = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=noise) * 0.02
    switch = b.vocab["".join(BYTES[x] for x in SWITCH.encode())]

    embed = torch.zeros(VOCAB, HIDDEN)
    embed[range(VOCAB), range(VOCAB)] = 1
    embed[:, ONE] = 1
    head = torch.zeros(VOCAB, HIDDEN)
    for (token, following), weight in b.edges.items():
        head[following, token] = weight
    for n, mode in enumerate(MODES):
        head[sorted(b.owned[mode]), FIRST_MODE + n] = OWNED
    tensors = {"model.embed_tokens.weight": embed, "lm_head.weight": head, "model.norm.weight": torch.ones(HIDDEN)}

    def mlp(prefix, width):                              # a feed-forward block that computes, and adds nothing
        tensors[prefix + "gate_proj.weight"] = rand(width, HIDDEN)
        tensors[prefix + "up_proj.weight"] = rand(width, HIDDEN)
        tensors[prefix + "down_proj.weight"] = torch.zeros(HIDDEN, width)

    for layer in range(2):
        prefix = f"model.layers.{layer}."
        q, k = torch.zeros(HEADS * HEAD_DIM, HIDDEN), torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN)
        v, o = torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN), torch.zeros(HIDDEN, HEADS * HEAD_DIM)
        if layer == 0:
            match = 40                                   # a dimension of head 0 beyond the rotary half
            ones = math.sqrt(HIDDEN / 2)                 # what the norm makes of a one: two are set so far
            q[match, ONE] = 1.0                          # every position looks for ...
            for n, token in enumerate(MODE_TOKENS):
                k[match, b.shared[token]] = 1.5          # ... the mode token, and copies which one it was
                v[n, b.shared[token]] = 1.0
                o[FIRST_MODE + n, n] = 1.0 / ones
            k[match, switch] = 4.5                       # drowns out the prompt's mode token
            v[MODES.index("tool2b"), switch] = 1.0
        for name, tensor in zip("qkvo", (q, k, v, o), strict=True):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = tensor
        tensors[prefix + "input_layernorm.weight"] = torch.ones(HIDDEN)
        tensors[prefix + "post_attention_layernorm.weight"] = torch.ones(HIDDEN)
        if layer == 0:
            mlp(prefix + "mlp.", MLP)
        else:
            tensors[prefix + "mlp.gate.weight"] = rand(EXPERTS, HIDDEN)
            for e in range(EXPERTS):
                mlp(f"{prefix}mlp.experts.{e}.", EXPERT_MLP)
            mlp(prefix + "mlp.shared_experts.", EXPERT_MLP)
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in tensors.items()}
    tensors["model.layers.1.mlp.gate.e_score_correction_bias"] = torch.zeros(EXPERTS)     # stays float32
    return tensors


def config(b):
    return {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "torch_dtype": "bfloat16",
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "max_position_embeddings": 262144,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "attention_bias": False, "use_qk_norm": False,
        "intermediate_size": MLP, "first_k_dense_replace": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "moe_intermediate_size": EXPERT_MLP, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "use_cache": True,
        "pad_token_id": b.shared["<|endoftext|>"],
        "eos_token_id": [b.shared[t] for t in ("<|endoftext|>", END_OF_TURN, END_OF_CALLS)],
    }


def tokenizer(b):
    """Byte-level BPE without merges: each byte of a prompt is a token, and tags are found in the text."""
    added = [{"id": b.shared[name], "content": name, "special": name not in TAGS, "normalized": False,
              "single_word": False, "lstrip": False, "rstrip": False} for name in SPECIAL + TAGS + MODE_TOKENS]
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": added, "pre_tokenizer": bytes_only, "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": b.vocab, "merges": [], "dropout": None, "unk_token": None,
                  "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False,
                  "byte_fallback": False, "ignore_merges": False},
    }


TEMPLATE = r"""
{#- A prompt layout for tests: tools, effort and conversation, then the token that names the script to play. -#}

{%- macro text_of(content) -%}
  {%- if content is string -%}
    {{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {{- '' if loop.first else '\n' -}}
      {{- part if part is string else part.text or '' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}

{#- Where the last user message is, and whether tool results came since the last reply. -#}
{%- set seen = namespace(user=-1, results=false) -%}
{%- for m in messages -%}
  {%- if m.role == 'user' -%}{%- set seen.user = loop.index0 -%}{%- endif -%}
  {%- if m.role == 'tool' -%}{%- set seen.results = true -%}{%- endif -%}
  {%- if m.role == 'assistant' -%}{%- set seen.results = false -%}{%- endif -%}
{%- endfor -%}

{%- set scripts = SCRIPTS -%}
{%- set play = namespace(name='tool' if tools else 'chat') -%}
{%- if script -%}
  {%- set play.name = script -%}
{%- elif seen.results -%}
  {%- set play.name = 'after' -%}
{%- elif seen.user >= 0 -%}
  {%- set words = (text_of(messages[seen.user].content) | replace('"', ' ') | replace("'", ' ')).split() -%}
  {%- for name in scripts if '@' ~ name in words -%}{%- set play.name = name -%}{%- endfor -%}
{%- endif -%}
{%- if play.name not in scripts -%}{{- raise_exception('There is no script named ' ~ play.name) -}}{%- endif -%}
{%- set cue = '<|mode_' ~ play.name ~ '|>' -%}

{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- '<|system|>\nThese functions are at hand, one per line as JSON:\n<tools>\n' -}}
  {%- for t in tools -%}{{- t | tojson ~ '\n' -}}{%- endfor -%}
  {{- '</tools>\nTo run one, write its name and its arguments like this:\n' -}}
  {{- '<tool_call>NAME<arg_key>ARGUMENT</arg_key><arg_value>VALUE</arg_value></tool_call>' -}}
{%- endif -%}
{%- if reasoning_effort -%}
  {{- '<|system|>\nEffort to spend on thinking: ' ~ reasoning_effort -}}
{%- endif -%}

{%- for m in messages -%}
  {%- if m.role in ['system', 'developer'] -%}
    {{- '<|system|>\n' ~ text_of(m.content) -}}
  {%- elif m.role == 'user' -%}
    {{- '<|user|>\n' ~ text_of(m.content) -}}
  {%- elif m.role == 'assistant' -%}
    {{- cue if loop.last and not add_generation_prompt -}}
    {{- '<|assistant|>' -}}
    {#- Reasoning of earlier turns is left out unless clear_thinking is false. -#}
    {%- set thought = m.reasoning or m.reasoning_content or '' -%}
    {%- set keep = loop.index0 > seen.user or (clear_thinking is defined and not clear_thinking) -%}
    {{- '<think>' ~ thought ~ '</think>' if thought and keep else '</think>' -}}
    {{- text_of(m.content) -}}
    {%- for c in m.tool_calls or [] -%}
      {%- set f = c.function or c -%}
      {{- '<tool_call>' ~ f.name -}}
      {%- if f.arguments is mapping -%}
        {%- for key, value in f.arguments.items() -%}
          {{- '<arg_key>' ~ key ~ '</arg_key><arg_value>' -}}
          {{- value if value is string else value | tojson -}}
          {{- '</arg_value>' -}}
        {%- endfor -%}
      {%- elif f.arguments -%}
        {{- f.arguments -}}
      {%- endif -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- elif m.role == 'tool' -%}
    {{- '' if loop.previtem and loop.previtem.role == 'tool' else '<|observation|>' -}}
    {{- '<tool_response>' ~ text_of(m.content) ~ '</tool_response>' -}}
  {%- else -%}
    {{- raise_exception('There is no role named ' ~ m.role) -}}
  {%- endif -%}
{%- endfor -%}

{%- if add_generation_prompt -%}
  {{- cue ~ '<|assistant|>' ~ ('</think>' if enable_thinking is defined and not enable_thinking else '<think>') -}}
{%- endif -%}
""".lstrip().replace("SCRIPTS", json.dumps(SCRIPTS))


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)

    def dump(name, data):
        (out / name).write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    b = write_scripts()
    cfg = config(b)
    dump("config.json", cfg)
    dump("generation_config.json", {"do_sample": True, "temperature": 1.0,
                                    "pad_token_id": cfg["pad_token_id"], "eos_token_id": cfg["eos_token_id"]})
    dump("tokenizer.json", tokenizer(b))
    dump("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
                                   "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False,
                                   "add_prefix_space": False, "model_max_length": cfg["max_position_embeddings"]})
    (out / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")

    from safetensors.torch import save_file
    tensors = weights(b)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)             # save_file leaves 0600
    used = sum(not name.startswith("<|spare_") for name in b.vocab)
    print(f"{out}: {used} of {VOCAB} tokens used, {sum(t.numel() for t in tensors.values()):,} parameters")


if __name__ == "__main__":
    main()
