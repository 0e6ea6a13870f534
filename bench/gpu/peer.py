"""One PyTorch training step to measure Tessera against. Started by steps.py under torchrun.

usage: torchrun ... peer.py MODEL:SEQUENCES STRATEGY FOLDER [full]

It builds and warms up, then measures whenever steps.py asks: a file FOLDER/go.N holds a number of
steps; rank 0 answers with FOLDER/done.N (JSON). FOLDER/stop ends it. While it waits the GPU idles,
so that several of these and Tessera can be measured in turn on the same cards.

With "full" all sequences have 384 tokens, and there is no mask.

Strategies (bf16, SDPA attention, fused AdamW, clipping at 1.0, dropout on, sequences padded to 384
with an attention mask, batches on the GPU beforehand):

    ddp ddp-c ddp-cm        DistributedDataParallel: eager, blocks compiled, whole model compiled
    zero1                   DDP with ZeroRedundancyOptimizer
    fsdp2 fsdp2-c           fully_shard without resharding after forward (stage 2); blocks compiled
    fsdp3 fsdp3-c           fully_shard (stage 3); blocks compiled
    one one-c one-graphs    one GPU: eager, whole model compiled, compiled with CUDA graphs
"""
import json
import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForQuestionAnswering

SIZES = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
              "intermediate_size": 4096},
}
LENGTH, BATCHES, WARM = 384, 8, 8


def build(name, strategy, local, mesh):
    """The module to call and a function that makes one optimizer step from a batch."""
    device = torch.device("cuda", local)
    torch.manual_seed(0)
    with device:
        model = BertForQuestionAnswering(BertConfig(attn_implementation="sdpa", **SIZES[name]))
    model.train()
    kind, _, how = strategy.partition("-")
    blocks = model.bert.encoder.layer
    if how == "c" and kind != "one":
        for block in blocks:
            block.compile()
    if kind in ("fsdp2", "fsdp3"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*blocks, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=kind == "fsdp3")
        called = model
    elif kind == "one":
        called = model
        if how:
            called = torch.compile(model, mode="reduce-overhead" if how == "graphs" else "default")
    else:
        called = DistributedDataParallel(model, device_ids=[local], gradient_as_bucket_view=True)
        if how == "cm":
            called = torch.compile(called)
    parameters = list(model.parameters())
    if kind == "zero1":
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=3e-5, fused=True)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=3e-5, fused=True)

    def step(batch):
        if how == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", torch.bfloat16, enabled=not kind.startswith("fsdp")):
            loss = called(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return model, step


def make_batches(sequences, vocab, rank, device, full):
    """Token ids at random, lengths as of SQuAD's windows (about 175 of 384 in the mean), or full."""
    g = torch.Generator().manual_seed(1000 + rank)
    out, real = [], 0
    for _ in range(BATCHES):
        ids = torch.randint(1000, vocab, (sequences, LENGTH), generator=g)
        lengths = torch.exp(torch.randn(sequences, generator=g) * 0.4 + 5.05).clamp(40, LENGTH)
        if full:
            lengths.fill_(LENGTH)
        mask = (torch.arange(LENGTH)[None] < lengths.long()[:, None]).long()
        real += int(mask.sum())
        start = torch.randint(0, 40, (sequences,), generator=g)
        batch = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids),
                 "start_positions": start, "end_positions": start}
        if not full:
            batch["attention_mask"] = mask
        out.append({k: v.to(device) for k, v in batch.items()})
    return out, real / BATCHES


def wait_for(folder, number):
    path = os.path.join(folder, f"go.{number}")
    while not os.path.exists(path):
        if os.path.exists(os.path.join(folder, "stop")):
            return 0
        time.sleep(0.02)
    with open(path, encoding="utf-8") as f:
        return int(f.read())


def answer(folder, name, record):
    path = os.path.join(folder, name)
    with open(path + ".part", "w", encoding="utf-8") as f:
        json.dump(record, f)
    os.rename(path + ".part", path)


def measure(step, batches, count):
    """Milliseconds a step without a host synchronisation in between."""
    for i in range(4):  # the allocator's blocks come back
        step(batches[i % BATCHES])
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for i in range(count):
        loss = step(batches[i % BATCHES])
    torch.cuda.synchronize()
    ms = (time.perf_counter() - begin) / count * 1e3
    value = float(loss.detach())
    process = process_gib()
    torch.cuda.empty_cache()  # others have their turn on this card
    return ms, value, process


def process_gib():
    """What the driver says that this process has of the card; None if it does not say."""
    try:
        out = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory",
                              "--format=csv,noheader,nounits"], stdout=subprocess.PIPE, text=True,
                             timeout=20).stdout
        rows = dict(line.split(", ") for line in out.splitlines() if ", " in line)
        return int(rows[str(os.getpid())]) / 1024
    except (OSError, KeyError, ValueError, subprocess.TimeoutExpired):
        return None


def main():
    cell, strategy, folder = sys.argv[1:4]
    name, sequences = cell.split(":")
    rank, world, local = (int(os.environ[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    dist.init_process_group("nccl", device_id=device)
    mesh = init_device_mesh("cuda", (world,))
    begin = time.time()
    model, step = build(name, strategy, local, mesh)
    batches, real = make_batches(int(sequences), model.config.vocab_size, rank, device,
                                 sys.argv[4:] == ["full"])
    for i in range(WARM):
        step(batches[i % BATCHES])
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if rank == 0:
        answer(folder, "ready", {"warm_s": time.time() - begin, "torch": torch.__version__,
                                 "real_tokens": real})
    number = 1
    while (count := wait_for(folder, number)) > 0:
        ms, loss, process = measure(step, batches, count)
        if rank == 0:
            answer(folder, f"done.{number}", {
                "ms": ms, "loss": loss, "process_gib": process,
                "reserved_gib": torch.cuda.max_memory_reserved() / 2**30})
        number += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
