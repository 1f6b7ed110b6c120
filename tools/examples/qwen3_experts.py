"""Train a mixture of experts that transformers has sharded: dense weights by FSDP2, experts divided between ranks.

Run this command on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/qwen3_experts.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

import megazpp

sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "head_dim": 16}
heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8}
torch.manual_seed(0)
folder = tempfile.mkdtemp()  # in a real program, the folder of a pretrained model
Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts_per_tok=2)).save_pretrained(folder)

device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
dist.init_process_group(device_id=None if device.type == "cpu" else device)
spread = DistributedConfig(fsdp_size=dist.get_world_size(), ep_size=2)  # each pair of ranks divides the experts
how = {"distributed_config": spread, "experts_implementation": "eager", "dtype": torch.float32}
model = Qwen3MoeForCausalLM.from_pretrained(folder, **how)
megazpp.zeropp(model)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + dist.get_rank())  # each rank trains on different data
for step in range(4):
    tokens = torch.randint(256, (2, 32), device=device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step + 1} rank {dist.get_rank()} loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
