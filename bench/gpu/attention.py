#!/usr/bin/env python3
"""Attention of Tessera beside PyTorch's varlen FlashAttention, on one GPU.

usage: bench/gpu/attention.py [T...] [--rounds 3]        default: 1408 2816 11264 24576

bench/cuda_ops measures Tessera's passes at T tokens: sequences of 176, or 64 equal ones where that
is more; with dropout 0.1, bf16, in CUDA graphs over several sets of tensors. The same shapes go
through torch.ops.aten._flash_attention_forward and _backward with cu_seqlens, in graphs over as many
bytes. Both in turn, --rounds times; shown is the median in us a layer.
"""
import argparse
import os
import re
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import runs  # noqa: E402

MODELS = {"base": 12, "large": 16}
WIDTH, MAX_SEQUENCES, LENGTH, DROPOUT, TOUCHED = 64, 64, 176, 0.1, 256 << 20


def tessera(tokens):
    """(model, T, pass) -> us."""
    wrap = os.path.join(runs.ROOT, "build/gpu/run")
    command = [wrap, "bench/cuda_ops"] if os.path.exists(wrap) else \
        [os.path.join(runs.ROOT, "build/release/bench/cuda_ops")]
    done = subprocess.run(command + [str(t) for t in tokens], cwd=runs.ROOT, check=True,
                          stdout=subprocess.PIPE, text=True)
    rows = re.findall(r"^(\w+) +(\d+)  attention (\w+) +([0-9.]+)", done.stdout, re.M)
    return {(m, int(t), which): float(us) for m, t, which, us in rows}


class Torch:
    """The passes at one shape, each a graph over several sets of tensors."""

    def __init__(self, heads, tokens):
        import torch
        self.torch = torch
        count = min(tokens // LENGTH, MAX_SEQUENCES)
        ends = [tokens * i // count for i in range(count + 1)]
        longest = max(b - a for a, b in zip(ends, ends[1:]))
        cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
        sets = max(TOUCHED // (tokens * heads * WIDTH * 2 * 8), 1)
        self.sets, self.keep = sets, []
        g = torch.Generator("cuda").manual_seed(1)

        def rand():
            return torch.randn(tokens, heads, WIDTH, device="cuda", dtype=torch.bfloat16, generator=g)

        given = [(rand(), rand(), rand(), rand()) for _ in range(sets)]
        aten = torch.ops.aten

        def forward(x):
            q, k, v, _ = x
            return aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, DROPOUT, False,
                                                 False)

        made = [forward(x) for x in given]

        def backward(x, y):
            q, k, v, dout = x
            return aten._flash_attention_backward(dout, q, k, v, y[0], y[1], cu, cu, longest, longest,
                                                  DROPOUT, False, y[2], y[3])

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
    p.add_argument("tokens", nargs="*", type=int, default=[1408, 2816, 11264, 24576])
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    ours, theirs = {}, {}
    for _ in range(args.rounds):
        for key, us in tessera(args.tokens).items():
            ours.setdefault(key, []).append(us)
        for model, heads in MODELS.items():
            for t in args.tokens:
                torch = Torch(heads, t)
                for which in ("forward", "backward"):
                    theirs.setdefault((model, t, which), []).append(torch.us(which))
    print(f"{runs.gpu_name()}, us a layer, dropout {DROPOUT}, head width {WIDTH}")
    print("| model | tokens | forward | backward | both | PyTorch forward | backward | both | PyTorch / "
          "Tessera |\n|---|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        for t in args.tokens:
            a, b = ([statistics.median(x[model, t, w]) for w in ("forward", "backward")]
                    for x in (ours, theirs))
            print(f"| BERT-{model} | {t} | {a[0]:.1f} | {a[1]:.1f} | {sum(a):.1f} | {b[0]:.1f} | "
                  f"{b[1]:.1f} | {sum(b):.1f} | {sum(b) / sum(a):.2f} |")


if __name__ == "__main__":
    main()
