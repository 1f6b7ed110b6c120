"""The peer of the part "training": a GPT as people write it in plain PyTorch (nanoGPT's loop), on one GPU.

fp32 parameters, autocast to bf16, scaled_dot_product_attention, tied embeddings, fused AdamW, the whole model compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megazpp.data.batch import MicroBatch
from megazpp.model.config import GPTConfig

LEARNING_RATE, WEIGHT_DECAY, BETAS, CLIP = 1e-4, 0.1, (0.9, 0.95), 1.0


class PeerBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden
        self.heads = config.heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.mlp_proj = nn.Linear(width, config.ffn_size), nn.Linear(config.ffn_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, seq, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, seq, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class PeerGPT(nn.Module):
    """tokens and labels [B, S] -> mean loss."""

    def __init__(self, config: GPTConfig, padded_vocab_size: int) -> None:
        super().__init__()
        assert config.max_position_embeddings is not None
        self.wte = nn.Embedding(padded_vocab_size, config.hidden)
        self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden)
        self.blocks = nn.ModuleList(PeerBlock(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, padded_vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=config.init_method_std)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class PeerStep:
    """One optimizer step on micro-batches."""

    def __init__(self, config: GPTConfig, padded_vocab_size: int, device: torch.device, *, compiled: bool) -> None:
        with device:
            self.model = PeerGPT(config, padded_vocab_size)
        self._run = torch.compile(self.model) if compiled else self.model
        self._device_type = device.type
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, fused=True)

    def __call__(self, micro_batches: Sequence[MicroBatch]) -> None:
        for batch in micro_batches:
            with torch.autocast(self._device_type, dtype=torch.bfloat16):
                loss = self._run(batch.tokens, batch.labels) / len(micro_batches)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
