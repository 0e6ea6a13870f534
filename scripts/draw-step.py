#!/usr/bin/env python3
"""Draw docs/step.svg: the step program of the demo at zero stage 3, one column an instruction.

usage: scripts/draw-step.py [TESSERA] >docs/step.svg

Everything in the picture is read from `tessera plan --show-program`: what is issued on which
stream, which buffers live from which instruction to which, and the bytes that live. Standard
library only.
"""
import re
import subprocess
import sys

COMMAND = ["plan", "--config", "configs/demo.yaml", "--ranks", "2", "--zero-stage", "3",
           "--set", "train.max_unit_numel=16777216",  # the word table in one unit: fewer columns
           "--show-program"]
LINE = re.compile(
    r"\s*(?P<index>\d+) (?P<stream>\w+)\s+(?P<op>\w+)(?:\s+unit (?P<unit>\d+))?.*?"
    r"(?P<rows> rows)?  "
    r"reads(?P<reads>.*?)  writes(?P<writes>.*?)  after(?P<after>.*?)  ends(?P<ends>.*?)"
    r"  live (?P<live>\d+)$")
UNITS = ["word table", "embedding norm", "block 0", "block 1", "head"]
COLOURS = ["#c8553d", "#d9a441", "#4a7c59", "#3c6e9f", "#7d5ba6"]
NO_UNIT = "#777777"
LETTER = {"GATHER": "G", "FORWARD": "F", "BACKWARD": "B", "REDUCE": "R", "NORM": "N",
          "UPDATE": "U", "BEGIN": "b", "AGREE": "A"}
COLUMN, LEFT, TOP, ROW, BAR = 26, 150, 62, 26, 11
GROUPS = ["gathered parameters", "rows of all ranks", "whole gradients", "gradient shards", "activations", "scratch"]


class Buffer:
    def __init__(self, first, instr):
        self.first, self.last, self.unit, self.op = first, None, instr["unit"], instr["op"]
        self.readers = set()


def parse(text):
    """The instructions of the step program; each is a dict of the fields of LINE."""
    instrs = []
    for line in text.split("\nstep:")[1].split("\n")[1:]:
        match = LINE.match(line)
        if not match:
            break
        instr = match.groupdict()
        instr["letter"] = LETTER[instr["op"]]
        instr["op"] += instr["rows"] or ""
        for key in ("reads", "writes", "ends"):
            instr[key] = [int(b[1:]) for b in instr[key].split()]
        instr["unit"] = int(instr["unit"]) if instr["unit"] else -1
        instr["live"] = int(instr["live"])
        instrs.append(instr)
    return instrs


def find_lives(instrs):
    """Buffers that end in the step. One that is read first was made in the turn before."""
    lives, made = {}, {}
    for i, instr in enumerate(instrs):
        for b in instr["writes"]:
            made.setdefault(b, Buffer(i, instr))
        for b in instr["reads"]:
            if b in made:
                made[b].readers.add(instr["op"])
    for i, instr in enumerate(instrs):
        for b in instr["ends"]:
            lives[b] = made[b]
            lives[b].last = i
    return list(lives.values())


def group_of(buffer):
    if buffer.op == "GATHER rows" or "REDUCE rows" in buffer.readers:
        return "rows of all ranks"
    if buffer.op == "GATHER":
        return "gathered parameters"
    if buffer.op == "REDUCE" or "NORM" in buffer.readers:  # the table's BACKWARD writes its own
        return "gradient shards"
    if "REDUCE" in buffer.readers:
        return "whole gradients"
    return "activations" if buffer.readers else "scratch"


def spans(buffer, count):
    """Columns [first, last]; a buffer that is carried into the next turn has two pieces."""
    if buffer.last >= buffer.first:
        return [(buffer.first, buffer.last)]
    return [(0, buffer.last), (buffer.first, count - 1)]


def pack(buffers, count):
    """Rows of buffers whose lives do not meet."""
    rows = []
    for buffer in sorted(buffers, key=lambda b: spans(b, count)[0]):
        mine = spans(buffer, count)
        for row in rows:
            taken = [s for other in row for s in spans(other, count)]
            if all(a > d or b < c for a, b in mine for c, d in taken):
                row.append(buffer)
                break
        else:
            rows.append([buffer])
    return rows


def colour(unit):
    return COLOURS[unit] if 0 <= unit < len(COLOURS) else NO_UNIT


class Svg:
    def __init__(self):
        self.parts = []

    def rect(self, x, y, width, height, fill, title="", opacity=1.0):
        self.parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="2" '
                          f'fill="{fill}" fill-opacity="{opacity}"><title>{title}</title></rect>')

    def text(self, x, y, words, anchor="start", fill="#222222", size=11):
        self.parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" '
                          f'font-size="{size}">{words}</text>')

    def write(self, width, height):
        print(f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
              f'viewBox="0 0 {width} {height}" font-family="sans-serif">')
        print(f'<rect width="{width}" height="{height}" fill="#ffffff"/>')
        print("\n".join(self.parts))
        print("</svg>")


def draw_legend(svg):
    svg.text(LEFT, 18, "One step at zero stage 3, in program order. G gather, F forward, "
             "B backward, R reduce, N norm, A agree, U update", size=12)
    x = LEFT
    for unit, name in enumerate(UNITS):
        svg.rect(x, 30, 11, 11, colour(unit))
        svg.text(x + 15, 40, f"unit {unit}: {name}")
        x += 42 + 7 * len(f"{unit}: {name}")


def draw_streams(svg, instrs, y):
    for stream in ("compute", "gather", "reduce", "update"):
        svg.text(LEFT - 8, y + 16, f"{stream} stream", "end")
        for i, instr in enumerate(instrs):
            if instr["stream"] != stream:
                continue
            after = instr["after"].strip() or "nothing"
            svg.rect(LEFT + i * COLUMN + 1, y + 2, COLUMN - 2, ROW - 5, colour(instr["unit"]),
                     f'{i}: {instr["op"]}, waits for {after}')
            unit = instr["unit"] if instr["unit"] >= 0 else ""
            svg.text(LEFT + i * COLUMN + COLUMN / 2, y + 17, f'{instr["letter"]}{unit}',
                     "middle", "#ffffff")
        y += ROW
    return y


def draw_lives(svg, buffers, count, y):
    for group in GROUPS:
        rows = pack([b for b in buffers if group_of(b) == group], count)
        svg.text(LEFT - 8, y + 10, group, "end")
        for row in rows:
            for buffer in row:
                for first, last in spans(buffer, count):
                    svg.rect(LEFT + first * COLUMN + 1, y + 1, (last - first + 1) * COLUMN - 2,
                             BAR - 2, colour(buffer.unit),
                             f"{group}, unit {buffer.unit}: {first} to {last}", 0.8)
            y += BAR
        y += 7
    return y


def draw_live_bytes(svg, instrs, y, height=90):
    top = max(instr["live"] for instr in instrs)
    svg.text(LEFT - 8, y + 12, "live bytes", "end")
    svg.text(LEFT - 8, y + 26, f"peak {top / 2**20:.1f} MiB", "end")
    for i, instr in enumerate(instrs):
        tall = round(instr["live"] / top * height, 1)
        svg.rect(LEFT + i * COLUMN, round(y + height - tall, 1), COLUMN, tall, "#9aa5b1",
                 f'{i}: {instr["live"]} bytes')
    return y + height


def main():
    tessera = sys.argv[1] if len(sys.argv) > 1 else "./tessera"
    text = subprocess.run([tessera] + COMMAND, check=True, stdout=subprocess.PIPE, text=True).stdout
    instrs = parse(text)
    svg = Svg()
    draw_legend(svg)
    y = draw_streams(svg, instrs, TOP) + 10
    y = draw_lives(svg, find_lives(instrs), len(instrs), y) + 8
    y = draw_live_bytes(svg, instrs, y) + 18
    for words in ("A bar is the life of a buffer. What an R of gradients has read is held for one more B.",
                  "The word table moves by rows: F0 looks up all ranks' tokens in this rank's shard, and R0 "
                  "gives each rank its own rows;",
                  "G0 collects all ranks' rows of the gradient, and B0 sums those that this rank owns.",
                  "Live bytes include what lives always: this rank's shards of parameters, m and v."):
        svg.text(LEFT, y, words)
        y += 16
    svg.write(LEFT + len(instrs) * COLUMN + 12, y - 4)


if __name__ == "__main__":
    main()
