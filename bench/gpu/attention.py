#!/usr/bin/env python3
"""Attention of Tessera beside PyTorch's varlen FlashAttention, on one GPU.

usage: bench/gpu/attention.py [--rounds 3]

bench/cuda_attention measures Tessera's passes: windows of SQuAD's lengths, packed, and full windows
of 384; bf16, with dropout 0.1, with its masks kept from forward to backward (PyTorch's makes them
again) and without, in CUDA graphs over several sets of tensors. The same sequences go through
torch.ops.aten._flash_attention_forward and _backward with cu_seqlens, in graphs over as many bytes.
Both in turn, --rounds times; shown is the median in us a layer.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import runs  # noqa: E402

WINDOW, TOUCHED = 384, 256 << 20
NUMBER = r" +([0-9.]+)"
DROPOUT = {"0.1": 0.1, "kept": 0.1, "none": 0.0}  # in the bench's words
LINE = re.compile(rf"^(\S.*?) +(\d+) +\d+ +({'|'.join(DROPOUT)}){NUMBER} +[0-9.]+{NUMBER} +[0-9.]+$",
                  re.M)


def tessera():
    """{(case, head width, dropout): (us forward, us backward)}, in the bench's order."""
    wrap = os.path.join(runs.ROOT, "build/gpu/run")
    command = [wrap, "bench/cuda_attention"] if os.path.exists(wrap) else \
        [os.path.join(runs.ROOT, "build/release/bench/cuda_attention")]
    done = subprocess.run(command, cwd=runs.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    rows = {(x[1], int(x[2]), x[3]): (float(x[4]), float(x[5]))
            for x in LINE.finditer(done.stdout)}
    if not rows:
        sys.exit(f"attention.py: no figures of bench/cuda_attention: {done.stdout.strip()}")
    return rows


def cases():
    """{case: (lengths of its sequences, heads)}, from the bench's source."""
    with open(os.path.join(runs.ROOT, "bench/cuda_attention.c"), encoding="utf-8") as f:
        source = f.read()
    table = re.search(r"window_tokens\[MOST\] = \{([^}]*)\}", source)[1]
    windows = [int(x) for x in re.findall(r"\d+", table)]
    found = re.findall(r'\{"([a-z 0-9]+)", (\d+), (\d+), \d+, (true|false)\}', source)
    return {name: ([WINDOW] * int(count) if full == "true" else windows[:int(count)], int(heads))
            for name, count, heads, full in found}


class Torch:
    """The passes at one shape, each a graph over several sets of tensors."""

    def __init__(self, lengths, heads, width, dropout):
        import torch
        self.torch = torch
        ends = [0]
        for n in lengths:
            ends.append(ends[-1] + n)
        tokens, longest = ends[-1], max(lengths)
        cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
        sets = max(TOUCHED // (tokens * heads * width * 2 * 8), 1)
        self.sets, self.keep = sets, []
        g = torch.Generator("cuda").manual_seed(1)

        def rand():
            return torch.randn(tokens, heads, width, device="cuda", dtype=torch.bfloat16,
                               generator=g)

        given = [(rand(), rand(), rand(), rand()) for _ in range(sets)]
        aten = torch.ops.aten

        def forward(x):
            q, k, v, _ = x
            return aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, dropout, False,
                                                 False)

        made = [forward(x) for x in given]

        def backward(x, y):
            q, k, v, dout = x
            return aten._flash_attention_backward(dout, q, k, v, y[0], y[1], cu, cu, longest, longest,
                                                  dropout, False, y[2], y[3])

        self.graphs = {"forward": self.graph(lambda: [forward(x) for x in given]),
                       "backward": self.graph(lambda: [backward(x, y) for x, y in zip(given, made)])}

    def graph(self, run):
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.keep.append(run())
        return graph

    def us(self, which, repeats=9):
        torch, times = self.torch, []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self.graphs[which].replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / self.sets)
        return statistics.median(times)


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    ours, theirs, shapes = {}, {}, cases()
    for _ in range(args.rounds):
        for key, us in tessera().items():
            ours.setdefault(key, []).append(us)
        for case, width, dropout in ours:
            lengths, heads = shapes[case]
            torch = Torch(lengths, heads, width, DROPOUT[dropout])
            theirs.setdefault((case, width, dropout), []).append(
                (torch.us("forward"), torch.us("backward")))
    print(f"{runs.gpu_name()}, us a layer\n| case | head width | tokens | dropout | forward | backward "
          "| both | PyTorch forward | backward | both | PyTorch / Tessera |\n|" + "---|" * 11)
    for key in ours:
        case, width, dropout = key
        a, b = ([statistics.median(us) for us in zip(*x[key])] for x in (ours, theirs))
        print(f"| {case} | {width} | {sum(shapes[case][0])} | {dropout} | {a[0]:.1f} | {a[1]:.1f} | "
              f"{sum(a):.1f} | {b[0]:.1f} | {b[1]:.1f} | {sum(b):.1f} | {sum(b) / sum(a):.2f} |")


if __name__ == "__main__":
    main()
