"""Add ZeRO++ to a custom loop on FSDP2. Run on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/own_loop.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import megazpp

device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
dist.init_process_group(device_id=None if device.type == "cpu" else device)

torch.manual_seed(0)  # all ranks start with equal weights, which fully_shard divides
model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4))).to(device)
for block in model:
    fully_shard(block)
fully_shard(model)
megazpp.zeropp(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(1 + dist.get_rank())  # each rank trains on different data
for step in range(8):
    x = torch.randn(16, 128, device=device)
    loss = (model(x) - x).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} rank {dist.get_rank()} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
