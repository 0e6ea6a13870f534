#!/usr/bin/env python3
"""Golden numbers of a small BERT and DistilBERT for question answering, from PyTorch and
transformers.

Writes FAMILY_small.safetensors.gz for both and bert_tensors.json.gz to tests/data/golden. All is
computed in float64 from weights that are exact in float32; a float32 run of the same says what
rounding alone costs. Names in the safetensors file:

    weight.NAME                        weights, float32
    input.tokens/types/lengths/start/end   (B, PADDED) and (B), int32; after a sequence's length: 0
    MODE.loss                          float64
    MODE.hidden.K, MODE.logits         rows of all sequences one after the other
    MODE.grad.NAME                     of every parameter
    MODE.train.loss/norm/lr            per AdamW step, float64; loss and norm before the update
    packed.after.NAME                  weights after the last step
    rounding.MODE.WHAT                 largest error of the float32 run over the largest value

MODE packed: each sequence runs alone, softmax over its own rows; the loss is their mean. MODE
padded: one batch of PADDED columns with an attention mask, softmax over all columns, as
transformers does it; its rows include those of padding.
"""

import gzip
import json
import os
import struct
import sys

import numpy as np
import torch
import transformers
from transformers import (BertConfig, BertForQuestionAnswering, DistilBertConfig,
                          DistilBertForQuestionAnswering, get_linear_schedule_with_warmup)

OUT = os.path.join(os.path.dirname(__file__), "..", "tests", "data", "golden")
LENGTHS = [31, 18, 7]
PADDED = 36
STEPS, WARMUP, LR, DECAY, CLIP, EPS = 5, 2, 1e-3, 0.01, 1.0, 1e-8


BERT = {
    "name": "bert", "config": BertConfig, "model": BertForQuestionAnswering,
    "sizes": {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 2,
              "num_attention_heads": 3, "intermediate_size": 40, "max_position_embeddings": 40,
              "type_vocab_size": 2},
    "constants": {"layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.0,
                  "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu"},
    "types": True, "key_bias": "attention.self.key.bias", "last_norm": "output.LayerNorm.bias"}

DISTILBERT = {
    "name": "distilbert", "config": DistilBertConfig, "model": DistilBertForQuestionAnswering,
    "sizes": {"vocab_size": 97, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40,
              "max_position_embeddings": 40},
    "constants": {"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0,
                  "activation": "gelu"},
    "types": False, "key_bias": "attention.k_lin.bias", "last_norm": "output_layer_norm.bias"}


def small_config(family):
    return family["config"](**family["sizes"], **family["constants"],
                            attn_implementation="eager")


def make_weights(family, config):
    """Large enough that no part of the model is nearly linear; exact in float32."""
    rng = np.random.default_rng(20)
    weights = {}
    for name, p in family["model"](config).named_parameters():
        values = rng.standard_normal(p.shape)
        if p.ndim == 1 and name.endswith("weight"):  # of a LayerNorm
            values = 1.0 + 0.2 * values
        else:
            values = 0.25 * values
        weights[name] = values.astype(np.float32)
    return weights


def make_model(family, config, weights, dtype):
    model = family["model"](config).to(dtype).eval()
    missing = model.load_state_dict(
        {n: torch.tensor(w, dtype=dtype) for n, w in weights.items()}, strict=False)
    assert not missing.missing_keys and not missing.unexpected_keys, missing
    return model


def make_batch(config):
    rng = np.random.default_rng(21)
    tokens = np.zeros((len(LENGTHS), PADDED), np.int32)
    types = np.zeros_like(tokens)
    start, end = [], []
    for b, n in enumerate(LENGTHS):
        # Few different tokens, so that a gradient row sums over many positions.
        tokens[b, :n] = rng.integers(1, config.vocab_size // 3, n)
        tokens[b, n - 1] = config.vocab_size - 1
        types[b, n // 3:n] = 1
        start.append(int(rng.integers(n // 3, n)))
        end.append(int(rng.integers(start[-1], n)))
    return {"tokens": tokens, "types": types, "lengths": np.array(LENGTHS, np.int32),
            "start": np.array(start, np.int32), "end": np.array(end, np.int32)}


def call(family, model, batch, rows, columns):
    def ids(name):
        return torch.tensor(batch[name][rows, :columns], dtype=torch.long)

    mask = np.arange(columns)[None, :] < batch["lengths"][rows, None]
    types = {"token_type_ids": ids("types")} if family["types"] else {}
    return model(
        input_ids=ids("tokens"), **types,
        attention_mask=torch.tensor(mask.astype(np.int64)),
        start_positions=torch.tensor(batch["start"][rows], dtype=torch.long),
        end_positions=torch.tensor(batch["end"][rows], dtype=torch.long),
        output_hidden_states=True)


def forward(family, model, batch, mode):
    """The mean loss, and hidden states and logits with the rows of all sequences in order."""
    count = len(LENGTHS)
    if mode == "packed":
        parts = [call(family, model, batch, [b], n) for b, n in enumerate(LENGTHS)]
    else:
        parts = [call(family, model, batch, list(range(count)), PADDED)]
    loss = sum(p.loss for p in parts) / len(parts)
    hidden = [torch.cat([p.hidden_states[k].flatten(0, 1) for p in parts])
              for k in range(len(parts[0].hidden_states))]
    logits = torch.cat([torch.stack([p.start_logits, p.end_logits], -1).flatten(0, 1)
                        for p in parts])
    return loss, hidden, logits


def run_once(family, config, weights, batch, mode, dtype):
    model = make_model(family, config, weights, dtype)
    loss, hidden, logits = forward(family, model, batch, mode)
    loss.backward()
    out = {"loss": loss, "logits": logits}
    out.update({f"hidden.{k}": h for k, h in enumerate(hidden)})
    out.update({f"grad.{n}": p.grad for n, p in model.named_parameters()})
    return {n: t.detach().double().numpy() for n, t in out.items()}


def train(family, config, weights, batch, mode, dtype):
    model = make_model(family, config, weights, dtype)
    plain = [p for p in model.parameters() if p.ndim == 1]  # biases and LayerNorm
    decayed = [p for p in model.parameters() if p.ndim == 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.999), eps=EPS)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP, STEPS)
    losses, norms, rates = [], [], []
    for _ in range(STEPS):
        loss, _, _ = forward(family, model, batch, mode)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(float(loss.detach()))
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    after = {n: p.detach().double().numpy() for n, p in model.named_parameters()}
    return {"train.loss": losses, "train.norm": norms, "train.lr": rates}, after


def no_gradient(family, name):
    """Gradients that are zero in exact arithmetic, since a softmax ignores a shift of its row: only
    rounding is left of them, and AdamW makes steps of full size from it."""
    last = small_config(family).num_hidden_layers - 1
    return any(part in name for part in (
        family["key_bias"], "qa_outputs.bias", f"layer.{last}.{family['last_norm']}"))


def error(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)


def write_gz(path, data):
    # No time stamp and no name in the header: equal content gives an equal file.
    with open(path, "wb") as f, gzip.GzipFile("", "wb", 9, f, mtime=0) as z:
        z.write(data)
    print(f"{os.path.relpath(path)}: {os.path.getsize(path)} bytes")


def write_safetensors(path, tensors, metadata):
    kinds = {"float32": "F32", "float64": "F64", "int32": "I32"}
    header, data = {"__metadata__": metadata}, b""
    # float64 first: every tensor is then aligned to its own size.
    for name, t in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        raw = np.ascontiguousarray(t).tobytes()
        header[name] = {"dtype": kinds[str(t.dtype)], "shape": list(t.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_gz(path, struct.pack("<Q", len(text)) + text + data)


def small_model(family):
    config = small_config(family)
    weights, batch = make_weights(family, config), make_batch(config)
    tensors = {f"weight.{n}": w for n, w in weights.items()}
    tensors.update({f"input.{n}": v for n, v in batch.items()})
    for mode in ("packed", "padded"):
        exact = run_once(family, config, weights, batch, mode, torch.float64)
        rounded = run_once(family, config, weights, batch, mode, torch.float32)
        for name, value in exact.items():
            tensors[f"{mode}.{name}"] = value if name == "loss" else value.astype(np.float32)
        steps, after = train(family, config, weights, batch, mode, torch.float64)
        steps32, after32 = train(family, config, weights, batch, mode, torch.float32)
        for name, value in steps.items():
            tensors[f"{mode}.{name}"] = np.array(value, np.float64)
        if mode == "packed":
            tensors.update({f"packed.after.{n}": v.astype(np.float32) for n, v in after.items()})

        def worst(part, got, want):
            value = max(error(got[n], want[n]) for n in want
                        if n.startswith(part) and not no_gradient(family, n))
            tensors[f"rounding.{mode}.{part or 'after'}"] = np.array(value, np.float64)
            print(f"float32 rounding, {mode} {part or 'after'}: {value:.2e}")

        for part in ("loss", "hidden", "logits", "grad"):
            worst(part, rounded, exact)
        worst("train", steps32, steps)
        worst("", after32, after)
        print(mode, "losses", steps["train.loss"], "norms", steps["train.norm"],
              "lr", steps["train.lr"])
    metadata = {
        "format": "pt", "made_by": "scripts/golden_bert.py", "torch": torch.__version__,
        "transformers": transformers.__version__, "padded": str(PADDED)}
    metadata.update({key: str(value) for key, value in family["sizes"].items()})
    write_safetensors(os.path.join(OUT, f"{family['name']}_small.safetensors.gz"), tensors,
                      metadata)


def tensor_table(family, **sizes):
    with torch.device("meta"):
        model = family["model"](family["config"](**sizes))
    tensors = {n: list(p.shape) for n, p in model.named_parameters()}
    return {"count": sum(int(np.prod(s)) for s in tensors.values()), "tensors": tensors}


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.makedirs(OUT, exist_ok=True)
    small_model(BERT)
    small_model(DISTILBERT)
    tables = {
        "bert-base": tensor_table(BERT),
        "bert-large": tensor_table(BERT, hidden_size=1024, num_hidden_layers=24,
                                   num_attention_heads=16, intermediate_size=4096),
        "distilbert-base": tensor_table(DISTILBERT)}
    for name, table in tables.items():
        print(name, table["count"])
    write_gz(os.path.join(OUT, "bert_tensors.json.gz"),
             json.dumps(tables, separators=(",", ":")).encode())


if __name__ == "__main__":
    sys.exit(main())
