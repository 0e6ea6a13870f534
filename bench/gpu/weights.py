"""Write random weights of a BERT as Hugging Face stores them, so that many runs start quickly."""
import array
import json
import os
import random
import struct

BLOCK = 1_000_003  # values drawn; tensors take them round and round, which is random enough to time


def shapes(vocab, hidden, layers, ffn, positions, types):
    out = {"bert.embeddings.word_embeddings.weight": (vocab, hidden),
           "bert.embeddings.position_embeddings.weight": (positions, hidden),
           "bert.embeddings.token_type_embeddings.weight": (types, hidden)}

    def linear(name, rows, columns):
        out[name + ".weight"] = (rows, columns)
        out[name + ".bias"] = (rows,)

    def norm(name):
        out[name + ".weight"] = (hidden,)
        out[name + ".bias"] = (hidden,)
    norm("bert.embeddings.LayerNorm")
    for i in range(layers):
        block = f"bert.encoder.layer.{i}."
        for part in ("query", "key", "value"):
            linear(block + "attention.self." + part, hidden, hidden)
        linear(block + "attention.output.dense", hidden, hidden)
        norm(block + "attention.output.LayerNorm")
        linear(block + "intermediate.dense", ffn, hidden)
        linear(block + "output.dense", hidden, ffn)
        norm(block + "output.LayerNorm")
    linear("qa_outputs", 2, hidden)
    return out


def write(folder, **sizes):
    """model.safetensors in @folder: weights from N(0, 0.02^2), norms 1, biases 0."""
    draw = random.Random(1)
    normal = array.array("f", (draw.gauss(0, 0.02) for _ in range(BLOCK))).tobytes()
    header, at, tensors = {}, 0, shapes(**sizes)
    for name, shape in tensors.items():
        numel = shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + 4 * numel]}
        at += 4 * numel
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "model.safetensors"), "wb") as f:
        f.write(struct.pack("<Q", len(head)) + head)
        used = 0
        for name, entry in header.items():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            if name.endswith("bias"):
                f.write(bytes(left))
            elif "LayerNorm" in name:
                f.write(struct.pack("<f", 1.0) * (left // 4))
            else:
                while left > 0:
                    part = normal[used:used + left]
                    f.write(part)
                    left -= len(part)
                    used = (used + len(part)) % len(normal)
