#!/usr/bin/env python3
"""What transformers says about real weights, and whether Tessera's files say the same.

usage: parity.py reference MODEL FOLDER    write FOLDER/questions.json and reference.safetensors
       parity.py same-weights MODEL COPY   every tensor of COPY's encoder has MODEL's bits
       parity.py logits MODEL FOLDER       FOLDER/answers/nbest.json has MODEL's logits

reference.safetensors is for tests/model_parity.c: weights (float32), windows of real questions, and
hidden states in float64. rounding.* says how far transformers' own float32 run is from that, as the
largest error over the largest value: both sum in other orders, so Tessera may be as far, times the
factor that the golden numbers have.
"""
import gzip
import json
import os
import sys

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, BertForQuestionAnswering, BertModel

QUESTIONS = "data/squad/xquad.en.json.gz"
WINDOWS, ASKED, ROUNDINGS = 6, 40, 8.0


def read_questions(count):
    """Of every fifth paragraph, so that articles and lengths differ."""
    with gzip.open(QUESTIONS, "rt", encoding="utf-8") as f:
        articles = json.load(f)["data"]
    kept = []
    for article in articles:
        paragraph = max(article["paragraphs"], key=lambda p: len(p["context"]))
        paragraph["qas"] = paragraph["qas"][:1]
        article["paragraphs"] = [paragraph]
        kept.append(article)
    return kept[:count]


def encode(tokenizer, articles):
    pairs = [(a["paragraphs"][0]["qas"][0]["question"], a["paragraphs"][0]["context"])
             for a in articles]
    return [tokenizer(q, c, truncation="only_second", max_length=384, stride=128,
                      return_overflowing_tokens=True, return_offsets_mapping=True)
            for q, c in pairs]


def hidden_states(folder, windows, dtype):
    model = BertModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    out = []
    with torch.inference_mode():
        for ids, types in windows:
            got = model(torch.tensor([ids]), token_type_ids=torch.tensor([types]),
                        output_hidden_states=True)
            out.append([h[0].double().numpy() for h in got.hidden_states])
    return [np.concatenate(parts) for parts in zip(*out)]


def reference(folder, out):
    articles = read_questions(ASKED)
    with open(os.path.join(out, "questions.json"), "w", encoding="utf-8") as f:
        json.dump({"version": "1.1", "data": articles}, f, ensure_ascii=False)
    encoded = encode(AutoTokenizer.from_pretrained(folder), articles[:WINDOWS])
    windows = [(e["input_ids"][0], e["token_type_ids"][0]) for e in encoded]
    want = hidden_states(folder, windows, torch.float64)
    single = hidden_states(folder, windows, torch.float32)
    tensors = {"input.lengths": np.array([len(ids) for ids, _ in windows], np.int32),
               "input.tokens": np.concatenate([ids for ids, _ in windows]).astype(np.int32),
               "input.types": np.concatenate([types for _, types in windows]).astype(np.int32)}
    for k, (exact, rounded) in enumerate(zip(want, single)):
        tensors[f"hidden.{k}"] = exact
        tensors[f"rounding.hidden.{k}"] = np.array(
            [np.abs(rounded - exact).max() / np.abs(exact).max()])
    for name, values in load_file(os.path.join(folder, "model.safetensors")).items():
        if not name.startswith("pooler.") and name != "embeddings.position_ids":
            tensors["weight.bert." + name] = values
    save_file(tensors, os.path.join(out, "reference.safetensors"))
    worst = max(tensors[f"rounding.hidden.{k}"][0] for k in range(len(want)))
    print(f"{len(windows)} windows, {sum(len(ids) for ids, _ in windows)} tokens; float32 in "
          f"transformers is off by up to {worst:.2g}")


def same_weights(folder, copy):
    ours = load_file(os.path.join(copy, "model.safetensors"))
    compared = 0
    for name, values in load_file(os.path.join(folder, "model.safetensors")).items():
        if name.startswith("pooler.") or name == "embeddings.position_ids":
            continue
        got = ours["bert." + name]
        if got.shape != values.shape or got.tobytes() != values.tobytes():
            sys.exit(f"{name} differs")
        compared += values.size
    print(f"{compared} numbers of the encoder have the same bits")


def allowed_error(model32, model64, encoded):
    """As in reference(), of logits; and the logits themselves, float64, of every window."""
    worst, largest, out = 0.0, 0.0, []
    for e in encoded:
        for ids, types in zip(e["input_ids"], e["token_type_ids"]):
            inputs = (torch.tensor([ids]),)
            types = torch.tensor([types])
            exact = model64(*inputs, token_type_ids=types)
            rounded = model32(*inputs, token_type_ids=types)
            for a, b in ((exact.start_logits, rounded.start_logits),
                         (exact.end_logits, rounded.end_logits)):
                worst = max(worst, float((a - b.double()).abs().max()))
                largest = max(largest, float(a.abs().max()))
            out.append((exact.start_logits[0].numpy(), exact.end_logits[0].numpy()))
    return ROUNDINGS * max(worst, 1.2e-7 * largest), out


def logits(folder, out):
    """Each answer that Tessera lists stands in the text and has the logits of its tokens."""
    with open(os.path.join(out, "questions.json"), encoding="utf-8") as f:
        articles = json.load(f)["data"]
    with open(os.path.join(out, "answers", "nbest.json"), encoding="utf-8") as f:
        nbest = json.load(f)
    encoded = encode(AutoTokenizer.from_pretrained(folder), articles)
    models = []
    for dtype in (torch.float32, torch.float64):
        model, loading = BertForQuestionAnswering.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
        if loading["missing_keys"] or loading["unexpected_keys"] or loading["mismatched_keys"]:
            sys.exit(f"{folder}: transformers says {loading}")
        models.append(model.eval())
    with torch.inference_mode():
        allowed, windows = allowed_error(*models, encoded)
    worst, entries, at = 0.0, 0, 0
    for article, e in zip(articles, encoded):
        paragraph = article["paragraphs"][0]
        mine = windows[at:at + len(e["input_ids"])]
        at += len(mine)
        for entry in nbest[paragraph["qas"][0]["id"]]:
            error = span_error(entry, paragraph["context"], e, mine)
            worst, entries = max(worst, error), entries + 1
    print(f"{entries} answers of {len(articles)} questions: logits differ by at most {worst:.2g}, "
          f"allowed {allowed:.2g}")
    if not worst <= allowed:
        sys.exit("the logits differ")


def span_error(entry, context, encoded, windows):
    """The least difference to any span of tokens with that text."""
    least = float("inf")
    for w, (start, end) in enumerate(windows):
        offsets, sequence = encoded["offset_mapping"][w], encoded.sequence_ids(w)
        inside = [k for k, s in enumerate(sequence) if s == 1]
        for i in inside:
            if abs(start[i] - entry["start_logit"]) > 0.1:
                continue
            for j in range(i, min(i + 30, inside[-1] + 1)):
                if context[offsets[i][0]:offsets[j][1]] == entry["text"]:
                    least = min(least, max(abs(start[i] - entry["start_logit"]),
                                           abs(end[j] - entry["end_logit"])))
    return float(least)


if __name__ == "__main__":
    {"reference": reference, "same-weights": same_weights, "logits": logits}[sys.argv[1]](
        *sys.argv[2:])
