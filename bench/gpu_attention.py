#!/usr/bin/env python3
"""Our attention kernels beside PyTorch's scaled_dot_product_attention on the same GPU.

    bench/gpu_attention.py BENCH_GPU_ATTENTION [OUT.csv]      needs torch

Prefill: torch's flash and cuDNN backends on contiguous K and V of the query's head count (not paged, no copy in the time).
Decode has no counterpart there that reads pages; its rate stands beside a device-to-device copy of 4 GB."""
import csv
import json
import statistics
import subprocess
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


def timed(work, times=15):
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    out = []
    for _ in range(times):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        torch.cuda.synchronize()
        out.append(a.elapsed_time(b) * 1e3)
    return statistics.median(out)


def torch_us(case, backend):
    if case["before"] or case["what"] == "decode":
        return None
    kind = torch.float16 if case["fp16"] else torch.bfloat16
    shape = (case["batch"], case["heads"], case["rows"], case["dim"])
    q, k, v = (torch.randn(shape, device="cuda", dtype=kind) for _ in range(3))
    try:
        with sdpa_kernel(backend):
            return timed(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    except RuntimeError:
        return None


source = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
target = torch.empty_like(source)
copy = 8 * source.numel() / timed(lambda: target.copy_(source)) * 1e-3
del source, target
print(f"device copy {copy:.0f} GB/s (read + write)")
rows = []
for line in subprocess.run([sys.argv[1]], capture_output=True, text=True, check=True).stdout.splitlines():
    case = json.loads(line)
    case["copy_gb_s"] = round(copy)
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        us = torch_us(case, backend)
        case[name + "_us"] = us and round(us, 2)
        case["over_" + name] = us and round(case["us"] / us, 3)
    if case["what"] == "decode":
        case["share_of_copy"] = round(case["rate"] / copy, 3)
    rows.append(case)
    print(" ".join(f"{k}={v}" for k, v in case.items() if v is not None))
if len(sys.argv) > 2:
    with open(sys.argv[2], "w", newline="") as file:
        out = csv.DictWriter(file, sorted({k for r in rows for k in r}, key=lambda k: list(rows[0]).index(k) if k in rows[0] else 99))
        out.writeheader()
        out.writerows(rows)
