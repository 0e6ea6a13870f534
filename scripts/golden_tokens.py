#!/usr/bin/env python3
"""Tokens, ids and offsets from Hugging Face's `tokenizers`, for tests/io_wordpiece.c.

    code-points.tsv.gz   every code point c as "a" + c + "b": CRC-32 of ids and offsets, 1024 a line
    marks.jsonl.gz       400 texts whose combining marks are out of canonical order

usage: scripts/golden_tokens.py    (through `make golden`; writes into tests/data/tokenizer)
"""
import gzip
import json
import os
import random
import struct
import zlib

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

FOLDER = "tests/data/tokenizer"
BLOCK, END = 1024, 0x110000
MARKS = [chr(c) for c in (
    0x301, 0x323, 0x302E, 0x302F, 0x1B44, 0xA953, 0x1D165, 0x1D16D, 0x345, 0x93C, 0x94D, 0x3099,
    0x1734, 0x20DD, 0x344, 0xF73, 0xF71, 0x958, 0x6D6, 0x5B0, 0x9FE, 0xD3B, 0x1715, 0x1ABF, 0x8D4,
    0xEBA)]
BASES = [chr(c) for c in (
    0x61, 0x6F, 0x53, 0xE9, 0x1E69, 0x1D5, 0xD55C, 0xAC01, 0x4E2D, 0xF951, 0x2F80, 0x2F800, 0x212B,
    0x130)] + ["A\u030a"] + [chr(c) for c in (
        0x1FC1, 0x390, 0x31, 0x2E, 0x2D, 0x20, 0x2000, 0x915, 0xB94, 0x200D, 0, 0xFFFD, 0x1100,
        0x1161, 0x11A8, 0x2260, 0x226E, 0x958, 0x1B06, 0x212A, 0x2126, 0x1FEF, 0x37E, 0x387)]


def tokenizer(vocabulary, lower):
    t = Tokenizer(WordPiece.from_file(vocabulary, unk_token="[UNK]",
                                      max_input_chars_per_word=100))
    t.normalizer = BertNormalizer(clean_text=True, handle_chinese_chars=True,
                                  strip_accents=lower, lowercase=lower)
    t.pre_tokenizer = BertPreTokenizer()
    return t


def crc(numbers, start):
    return zlib.crc32(struct.pack(f"<{len(numbers)}I", *numbers), start)


def code_points(tokenizers):
    yield ("#first_code_point\tuncased_ids_crc32\tuncased_offsets_crc32\t"
           "cased_ids_crc32\tcased_offsets_crc32")
    for first in range(0, END, BLOCK):
        texts = ["a" + chr(c) + "b" for c in range(first, first + BLOCK)
                 if not 0xD800 <= c < 0xE000]
        if not texts:
            continue
        row = [f"{first:06X}"]
        for t in tokenizers:
            ids = offsets = 0
            for e in t.encode_batch(texts, add_special_tokens=False):
                ids = crc(e.ids, ids)
                offsets = crc([x for pair in e.offsets for x in pair], offsets)
            row += [f"{ids:08x}", f"{offsets:08x}"]
        yield "\t".join(row)


def marks(tokenizers):
    random.seed(20)
    for _ in range(400):
        text = "".join(random.choice(MARKS if random.random() < .55 else BASES)
                       for _ in range(random.randint(2, 14)))
        case = {"text": text}
        for name, t in zip(("uncased", "cased"), tokenizers):
            e = t.encode(text, add_special_tokens=False)
            case[name] = {"tokens": e.tokens, "ids": e.ids, "offsets": [list(o) for o in e.offsets]}
        yield json.dumps(case)


def write(name, lines):
    data = "".join(line + "\n" for line in lines).encode()
    path = os.path.join(FOLDER, name)
    with open(path, "rb") as f:
        if gzip.decompress(f.read()) == data:
            print(f"{path}: as it was")
            return
    with open(path, "wb") as f:
        f.write(gzip.compress(data, 9, mtime=0))
    print(f"{path}: written")


def main():
    pair = (tokenizer("data/vocab/bert-base-uncased-vocab.txt", True),
            tokenizer(os.path.join(FOLDER, "bert-base-cased-vocab.txt"), False))
    write("code-points.tsv.gz", code_points(pair))
    write("marks.jsonl.gz", marks(pair))


if __name__ == "__main__":
    main()
