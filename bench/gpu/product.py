#!/usr/bin/env python3
"""The rate of a matrix product of 8192^3 in bf16 on one GPU: in bursts, and for seconds on end.

usage: bench/gpu/product.py [--seconds 5]

bench/gpu/steps.py --full gives a step's rate; this is what that is a share of. A burst of ten products
is too short for the limit of the card's power, a training step is not, so both are shown. PyTorch's
product, which is cuBLAS's, of numbers from N(0, 1): zeros would draw less power and run faster.
"""
import argparse
import time

SIDE = 8192


def main():
    import torch
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--seconds", type=float, default=5)
    args = p.parse_args()
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def rate(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            torch.mm(a, b)
        end.record()
        torch.cuda.synchronize()
        return 2 * SIDE**3 * count / begin.elapsed_time(end) / 1e9

    bursts = []
    for _ in range(3):  # the first one loads the kernel
        bursts.append(rate(10))
        time.sleep(1)
    stop, rates = time.time() + args.seconds, []
    while time.time() < stop:
        rates.append(rate(200))
    print(f"{torch.cuda.get_device_name()}: {SIDE}^3 in bursts of ten {bursts[1]:.0f} and {bursts[2]:.0f} TFLOP/s, "
          f"for {args.seconds:g} s {rates[0]:.0f} at first, {min(rates[-4:]):.0f} to {max(rates[-4:]):.0f} at last")


if __name__ == "__main__":
    main()
