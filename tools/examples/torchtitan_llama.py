"""Train torchtitan's Llama 3 with ZeRO++. Run on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/torchtitan_llama.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import model_registry, parallelize_llama

import megazpp

device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
dist.init_process_group(device_id=None if device.type == "cpu" else device)
parallelism, training = ParallelismConfig(spmd_backend="partial_dtensor"), TrainingConfig(seq_len=64)
dims = ParallelDims.from_config(parallelism, dist.get_world_size())
with torch.device("meta"):
    model = model_registry("debugmodel").model.build()
rest = {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
parallelize_llama(model, parallel_dims=dims, training=training, parallelism=parallelism, **rest)
megazpp.zeropp(model)
model.to_empty(device=device)
torch.manual_seed(0)
torch.no_grad()(model.init_weights)()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())
for step in range(3):
    tokens = torch.randint(2048, (2, 65), device=device)
    positions = torch.arange(64, device=device).expand(2, 64)
    logits = model(tokens[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} rank {dist.get_rank()} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
