"""Compare `megazpp.zeropp` with plain FSDP2 on torchtitan's own mixture of experts, sharded by its own recipe.

From torch 2.14 on the mixture uses torchtitan's default back end, `spmd_types`, which older versions of torch lack.
"""

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers.frameworks import is_installed
from helpers.ranks import ranks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import megazpp

VOCAB, LENGTH, RANKS = 128, 16, 4
BACKEND = "spmd_types" if torch.__version__ >= (2, 14) else "partial_dtensor"


def small_config(parallelism: Any, *, lora: bool) -> Any:
    """Return the config of a Qwen3 mixture with two layers of width 32 and eight experts."""
    from types import SimpleNamespace

    from torchtitan.components.lora import LoRAConverter
    from torchtitan.models import qwen3

    sizes = {"n_layers": 2, "dim": 32, "n_heads": 4, "n_kv_heads": 4, "head_dim": 8, "moe_hidden_dim": 32}
    rope = qwen3.CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1e4)
    how = {"fuse_qkv": True, "num_experts": 8, "top_k": 2, "attn_backend": "flex", "moe_comm_backend": "standard"}
    config = type(qwen3.qwen3_configs["debugmodel_moe"](attn_backend="flex"))(
        vocab_size=VOCAB,
        dim=32,
        norm=qwen3._qwen3_norm(32),
        tok_embeddings=qwen3.Embedding.Config(num_embeddings=VOCAB, embedding_dim=32, param_init=qwen3._EMBEDDING_INIT),
        lm_head=qwen3.Linear.Config(in_features=32, out_features=VOCAB, param_init=qwen3._LINEAR_INIT),
        layers=qwen3._build_qwen3_moe_layers(**sizes, **how, rope=rope),
    )
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    if lora:  # LoRA freezes all weights but its adapters, so it also freezes the experts
        config = LoRAConverter.Config(rank=4, alpha=8.0, target_modules=["wo"]).build().convert(config)
    return config


@functools.cache
def parallel_dims(ep: int, tp: int) -> Any:
    """Return torchtitan's meshes, made once per process, because torchtitan compares meshes by identity."""
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, utils

    degrees = {"expert_parallel_degree": ep, "tensor_parallel_degree": tp}
    parallelism = ParallelismConfig(spmd_backend=BACKEND, enable_sequence_parallel=False, **degrees)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    utils.set_spmd_backend(BACKEND)
    return parallelism, dims


def train(zeropp: bool, case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], Any]:
    """Train three steps; return losses, gradients of the last step and weights by name, and the handle if there is one.

    Weights of experts are multiplied in fp32 instead of torchtitan's bf16, whose rounding would hide differences.
    """
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.qwen3 import parallelize_qwen3

    ep, tp, accumulate = case.get("ep", 2), case.get("tp", 1), case.get("accumulate", 1)
    parallelism, dims = parallel_dims(ep, tp)
    with torch.device("meta"):
        model = small_config(parallelism, lora=case.get("lora", False)).build()
    parallelize_qwen3(
        model,
        parallel_dims=dims,
        parallelism=parallelism,
        training=TrainingConfig(seq_len=LENGTH, mixed_precision_param="float32"),
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config() if case.get("checkpointing") else None,
        dump_folder="",
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and not any(part in name for part in case.get("frozen", ())))
    handle = None
    if zeropp:
        exact: dict[str, Any] = {"zero_weight_bits": 16, "zero_gradient_bits": (16, 16), "zero_error_feedback": False}
        config = megazpp.ZeroConfig(zeropp=True, **exact)
        handle = megazpp.zeropp(model, ranks_per_node=case.get("ranks_per_node", 2), config=config)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that divides
    context = utils.get_spmd_context(parallel_dims=dims)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad(), context():
        model.init_weights()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5, momentum=0.9)
    losses, result = [], {}
    for step in range(3):
        for number in range(accumulate):
            model.set_requires_gradient_sync(number == accumulate - 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * number + dist.get_rank() // tp)
            ids, positions = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator), torch.arange(LENGTH)
            positions = positions.expand(2, -1)
            with context():
                logits = model(ids[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions))
                logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
                total = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum")
                (total / ids[:, 1:].numel() / RANKS / accumulate).backward()
            losses.append(total.item())
        result = {f"{name}.grad": p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
        utils.clip_grad_norm_(trained, 1.0, ep_enabled=True)
        optimizer.step()
        optimizer.zero_grad()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = {name: parameter.detach().full_tensor() for name, parameter in model.named_parameters()}
    return {"losses": torch.tensor(losses), **result, **weights}, handle


def grouped_product(self: Any, **given: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix, also the padding rows after the last expert's rows."""
    rows, matrices, ends = given["A"], given["B_t"], [0, *given["offs"].tolist()]
    parts = [rows[start:end] @ matrix for start, end, matrix in zip(ends, ends[1:], matrices, strict=False)]
    return torch.cat([*parts, rows[ends[-1] :] @ matrices[0]])


def like_fsdp2(case: dict[str, Any]) -> None:
    from helpers.on_cpu import torchtitan_on_cpu

    torchtitan_on_cpu()
    from torchtitan.models.common.moe import GroupedExperts

    GroupedExperts._grouped_mm = grouped_product
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]
    expected, _ = train(False, case)
    found, handle = train(True, case)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert handle.counter.sent_bytes("cross") > 0


@pytest.mark.nightly  # tests/drop_in/test_expert_meshes.py shards its own mixture by the same recipe, in the slow tier
@pytest.mark.skipif(not is_installed("torchtitan"), reason="torchtitan is not installed, or not for this torch")
@pytest.mark.parametrize(
    "case",
    [{"checkpointing": True, "accumulate": 2}, {"checkpointing": True, "lora": True}, {"frozen": ("experts",)}],
    ids=str,
)
def test_torchtitan_mixture_trains_as_in_plain_fsdp2(case):
    """ZeRO++ sums gradients in another order than plain FSDP2, which the tolerance covers."""
    workers = ranks.__wrapped__(RANKS)
    workers.run(like_fsdp2, case)
    workers.stop()
