"""Train with Accelerate, gradient accumulation and ZeRO++. Run on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import megazpp

plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
set_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
samples = torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(0))
loader = DataLoader([{"input_ids": ids, "labels": ids} for ids in samples], batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
megazpp.zeropp(model)

for step, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
accelerator.end_training()
