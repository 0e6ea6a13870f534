#!/usr/bin/env python3
"""Put what `tessera calibrate` measured on one H200 into the profile that is built in.

usage: scripts/take-rates.py MACHINE.yaml        then: make, make docs, make test, and bench/RESULTS.md

MACHINE.yaml is calibrate's file (`tessera calibrate --ranks 1 --output MACHINE.yaml`). engine/train/h200.yaml
takes the groups products, attention and memory from it, and kernel_us, least_us, edge_us and turn_us of
launch, to three digits. It keeps what one card cannot measure: links and what collectives cost, and the published
rate of attention at 2048 tokens. H100 and A100 follow from it (engine/train/machine.c).
Standard library only.
"""
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
BUILT_IN = os.path.join(HERE, "..", "engine", "train", "h200.yaml")
WHOLE = ("products", "attention", "memory")
LAUNCH = ("kernel_us", "least_us", "edge_us", "turn_us")
LONG = "; 2048: 335 of arXiv:2307.08691, section 4.1 (H100), counted as 3 in place of 3.5 passes"


def groups_of(path):
    """Lines by top-level key, in their order; "" is what stands before the first group."""
    with open(path, encoding="utf-8") as f:
        lines = f.read().splitlines()
    groups, name = {"": []}, ""
    for line in lines:
        start = re.match(r"(\w+):$", line)
        if start:
            name = start.group(1)
        groups.setdefault(name, []).append(line)
    return groups


def three_digits(line):
    number = re.match(r"(\s+[\w]+: )([0-9.e+]+)$", line)
    return f"{number.group(1)}{float(f'{float(number.group(2)):.3g}'):g}" if number else line


def of_one_card(line):
    return line.replace("tessera calibrate, 1 GPUs: ", "tessera calibrate, one H200: ")


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    measured, built_in = groups_of(sys.argv[1]), groups_of(BUILT_IN)
    if 'name: "NVIDIA H200"' not in measured[""]:
        sys.exit(f"take-rates: {sys.argv[1]}: expected a profile of an NVIDIA H200")
    date = next(line for line in measured[""] if line.startswith("date:"))
    built_in[""] = [date if line.startswith("date:") else line for line in built_in[""]]
    long_point = next(line for line in built_in["attention"] if line.startswith("      2048:"))
    for name in WHOLE:
        built_in[name] = [of_one_card(three_digits(line)) for line in measured[name]]
    rows = built_in["attention"]
    rows[1] = rows[1][:-1] + LONG + '"'
    rows.insert(max(i for i, line in enumerate(rows) if line.startswith("      ")) + 1, long_point)
    for key in LAUNCH:
        new = next(line for line in measured["launch"] if line.startswith(f"  {key}:"))
        built_in["launch"] = [three_digits(new) if line.startswith(f"  {key}:") else line
                              for line in built_in["launch"]]
    with open(BUILT_IN, "w", encoding="utf-8") as f:
        f.write("\n".join(line for lines in built_in.values() for line in lines) + "\n")
    print(f"take-rates: {os.path.relpath(BUILT_IN)} has the rates of {sys.argv[1]}")


if __name__ == "__main__":
    main()
