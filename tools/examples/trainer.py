"""Train with transformers' Trainer and ZeRO++. Run on each of two nodes; HOST is the first node's address:

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 tools/examples/trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import megazpp

set_seed(0)
config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
samples = torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(0))
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    max_steps=4,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in samples],
    callbacks=[megazpp.trainer_callback()],
)
trainer.train()
