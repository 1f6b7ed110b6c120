"""Test LoRA on several ranks.

Adapters train as in one process, on a frozen base that also serves as the reference model.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.hf_models import our_model
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import nightly, slow
from helpers.training import CLIP, CPU, GPT2_STYLE, LLAMA_STYLE, MIXTURE_STYLE, Case, dims_on_ranks, spec_of

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights
from megazpp.convert.native import open_checkpoint
from megazpp.lora.checks import adapter_settings
from megazpp.lora.config import LoraConfig
from megazpp.lora.layers import LowRankAdapter, LowRankExpertAdapter, adapters_off
from megazpp.lora.peft import tensors_file
from megazpp.lora.policy import AdaptedPolicy, add_adapters, load_adapted, save_adapter
from megazpp.model.gpt import GPTModel
from megazpp.optim.build import build_optimizer
from megazpp.optim.config import LossScaleConfig, OptimizerConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.packed_weights.format import plan_rows
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.training.step import TrainStep

STEPS = 3
ALL = LoraConfig(lora_r=3, lora_alpha=6.0, lora_target_modules=("all-linear",))
WIDE = dataclasses.replace(LLAMA_STYLE, hidden_size=128, kv_channels=16, ffn_hidden_size=256)
MIXTURE = dataclasses.replace(MIXTURE_STYLE, moe_aux_loss_coeff=0.0)
EXPERTS = dataclasses.replace(ALL, lora_target_modules=("q_proj", "w1", "w2", "w3"))
MODELS = {"mixture": MIXTURE, "gpt2": GPT2_STYLE, "llama": LLAMA_STYLE, "wide": WIDE}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], str]:
    """Return a function that saves a checkpoint of one of MODELS, once, and returns the checkpoint's folder.

    Rows of the wide model have several quantization blocks, even on each of two tp ranks.
    """

    @functools.cache
    def save(kind: str) -> str:
        folder = str(tmp_path_factory.mktemp(kind) / "save")
        ranks(2).run(run, Case(model=MODELS[kind], tp=2), 1, save=folder)
        return folder

    return save


def adapt(case: Case, lora: LoraConfig, load: str, **options: bool) -> tuple[AdaptedPolicy, ParallelDims]:
    dims = dims_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    return load_adapted(spec_of(case), lora, frozen_place(dims), source, record, **options), dims


def train(policy: AdaptedPolicy, dims: ParallelDims, case: Case) -> list[tuple[float, float]]:
    """Train the adapters of `policy`. Return (loss, gradient norm) of each step."""
    optimizer = build_optimizer(policy.built.model, OptimizerConfig())
    scaler = LossScaler(LossScaleConfig(), fp16=False)
    step = TrainStep(*policy.built, optimizer, scaler, dims, clip_grad=CLIP)
    batches = [case.batches(index, dims) for index in range(STEPS)]
    results = [step(each, learning_rate=case.learning_rate, weight_decay=0.01) for each in batches]
    return [(result.loss, result.grad_norm) for result in results]


def train_on_ranks(case: Case, lora: LoraConfig, load: str) -> dict[str, Any]:
    policy, dims = adapt(case, lora, load)
    trained = [name for name, _ in policy.built.model.named_parameters()]
    dropped: list[torch.Tensor] = []
    for name, module in policy.built.model.named_modules():
        if name == "layers.0.mlp.fc1.adapter.dropout":
            module.register_forward_hook(lambda module, inputs, output: dropped.append(output == 0))
    return {
        "steps": train(policy, dims, case),
        "trained": trained,
        "unpacked": [unit.name for unit in policy.base.units if unit.is_unpacked],
        "checksum": policy.settings.checksum,
        "dropped": dropped,
    }


@functools.cache
def in_one_process(kind: str, load: str, bits: Any = None, lora: LoraConfig = ALL) -> list[tuple[float, float]]:
    """Train adapters in one process, as a reference; return (loss, gradient norm) of each step.

    The frozen weights are unsharded, and rounded to `bits` if that is not None. Clipping and optimizer are torch's.
    """
    case, model = Case(model=MODELS[kind]), our_model(open_checkpoint(Path(load), None)[0], 16)
    if bits is not None:
        for weight in (each.detach() for each in model.parameters() if each.dim() == 2):
            rows = plan_rows(weight.shape[1], bits)
            weight.copy_(rows.unpack(rows.pack(weight), torch.empty_like(weight)))
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    add_adapters(model.requires_grad_(False), adapter_settings(lora, case.model), None)
    for module in model.modules():
        if isinstance(module, LowRankAdapter | LowRankExpertAdapter):
            module.to_empty(device=CPU)
    initialize_parameters_(model, seed=case.seed, draw_device=CPU)
    model.load_state_dict(base, strict=False)
    trained, results = [each for each in model.parameters() if each.requires_grad], []
    optimizer = torch.optim.AdamW(trained, lr=case.learning_rate, weight_decay=0.01)
    for index in range(STEPS):
        batch = case.batch(index, 0, case.global_batch)
        loss = model(batch.tokens, batch.labels, position_ids=batch.position_ids).mean()
        loss.backward()
        results.append((loss.item(), torch.nn.utils.clip_grad_norm_(trained, CLIP).item()))
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.parametrize(
    ("world", "kind", "layout", "recompute"),
    [
        (2, "gpt2", {"tp": 2, "sequence_parallel": True}, {}),
        nightly(4, "llama", {"nodes": 2, "micro_batches": 2}, {}),
        nightly(2, "llama", {"tp": 2}, {}),
        nightly(4, "llama", {"tp": 4, "sequence_parallel": True}, RECOMPUTED),
        slow(4, "gpt2", {"tp": 2, "nodes": 2}, RECOMPUTED),
        slow(4, "llama", {"tp": 2, "nodes": 2, "sequence_parallel": True}, {}),
        nightly(2, "gpt2", {"stage": 0}, {}),
        slow(2, "llama", {"stage": 2, "micro_batches": 2}, RECOMPUTED),
    ],
)
def test_adapters_train_as_in_one_process(saved, world, kind, layout, recompute):
    """Train adapters on several ranks, and compare with one process.

    fp32 sums in another order differ by up to 1e-5 over the steps.
    """
    model, expected = dataclasses.replace(MODELS[kind], **recompute), in_one_process(kind, saved(kind))
    results = ranks(world).run(train_on_ranks, Case(model=model, **layout), ALL, saved(kind))
    for found in results:
        torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert all(".adapter." in name for name in found["trained"])
        assert len(found["trained"]) == 2 * model.layers * (4 if kind == "gpt2" else 7)
        assert found["unpacked"] == []
    assert len({found["checksum"] for found in results}) == 1


@pytest.mark.parametrize(
    ("world", "layout", "recompute"),
    [
        (2, {"nodes": 2, "micro_batches": 2}, {}),
        nightly(2, {"tp": 2}, {}),
        slow(2, {"tp": 2, "sequence_parallel": True}, RECOMPUTED),
    ],
)
def test_adapters_on_experts_train_as_in_one_process(saved, world, layout, recompute):
    """Train adapters on experts, and compare with one process. fp32 sums in another order differ by up to 1e-5.

    The trained parameters are A and B of q_proj and of the three matrices of the experts, for all experts together.
    """
    model, expected = (
        dataclasses.replace(MIXTURE, **recompute),
        in_one_process("mixture", saved("mixture"), None, EXPERTS),
    )
    results = ranks(world).run(train_on_ranks, Case(model=model, **layout), EXPERTS, saved("mixture"))
    for found in results:
        torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert all(".adapter." in name for name in found["trained"])
        assert len(found["trained"]) == 2 * 4
        assert found["unpacked"] == []
    assert len({found["checksum"] for found in results}) == 1


def test_adapters_on_experts_equal_merged_experts():
    """Compare losses of a mixture with adapters on experts and with merged weights.

    Sums in another order differ by 1e-5.
    """
    generator, config = torch.Generator().manual_seed(1), MIXTURE
    model = GPTModel(config, vocab_size=101)
    initialize_parameters_(model, seed=3, draw_device=CPU)
    settings = adapter_settings(EXPERTS, config)._replace(targets=("w1", "w2", "w3"))
    add_adapters(model.requires_grad_(False), settings, None)
    experts, tokens = model.layers[0].mlp.experts, torch.randint(101, (2, 16), generator=generator)
    results = []
    for adapter in experts.adapter.values():
        adapter.to_empty(device=CPU)
        for parameter in adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    for merged in (False, True):
        if merged:
            for name, adapter in experts.adapter.items():
                a, b = (each.detach().view(config.num_experts, -1, settings.rank) for each in (adapter.a, adapter.b))
                delta = a @ b.mT if name == "fc2" else b @ a.mT
                getattr(experts, name).add_(settings.scale * delta.flatten(0, 1))
                adapter.enabled = False
        results.append(model(tokens, tokens))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        experts.gate.add_(1.0)
    assert not torch.allclose(model(tokens, tokens), results[1])


@pytest.mark.parametrize(
    ("bits", "world", "layout"),
    [
        nightly(8, 2, {"tp": 2, "sequence_parallel": True}),
        nightly(4, 2, {"nodes": 2}),
        slow(4, 2, {"tp": 2, "sequence_parallel": True}),
        slow(8, 2, {"nodes": 2}),
        slow(16, 4, {"tp": 2, "nodes": 2}),
    ],
)
def test_adapters_on_a_packed_base_train_as_on_its_unpacked_weights(saved, bits, world, layout):
    lora = dataclasses.replace(ALL, base_weight_bits=bits)
    expected, exact = (in_one_process("wide", saved("wide"), each) for each in (bits, None))
    for found in ranks(world).run(train_on_ranks, Case(model=WIDE, **layout), lora, saved("wide")):
        torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert found["unpacked"] == []
    # rounding the frozen base changes the first loss by 3e-5, so the comparison with a tolerance of 1e-5 shows that the
    # base was rounded
    assert abs(expected[0][0] - exact[0][0]) > 3e-5


def check_reference(case: Case, load: str, folder: str) -> None:
    """Check that training adapters does not change the losses of the reference model.

    The reference is the base without adapters, or with `keep_reference` the base with the adapters that were loaded.
    """
    policy, dims = adapt(case, ALL, load)
    batch = case.batch(9, dims.data_rank, 1)

    def losses(of: AdaptedPolicy, training: bool = False) -> torch.Tensor:
        with torch.no_grad():
            found = of.built.model.train(training)(batch.tokens, batch.labels)
        of.built.sharding.reshard()
        return found

    def reference(of: AdaptedPolicy) -> torch.Tensor:
        with adapters_off(of.built.model):
            return losses(of, training=True)

    base = reference(policy)
    # B of a new adapter is zero, so adapters do not change losses before training
    assert torch.equal(losses(policy), base)
    train(policy, dims, case)
    trained = losses(policy)
    assert not torch.allclose(trained, base, atol=1e-3)
    assert torch.equal(reference(policy), base)
    save_adapter(policy, Path(folder), dims)
    dims.world.share_object(None)
    other, _ = adapt(case, dataclasses.replace(ALL, lora_load=folder, lora_dropout=0.5), load, keep_reference=True)
    assert torch.equal(losses(other), trained)
    train(other, dims, case)
    assert not torch.allclose(losses(other), trained, atol=1e-3)
    # with `keep_reference`, the reference is the base with the loaded adapters, also after training
    assert torch.equal(reference(other), trained)


@pytest.mark.slow  # slow, because each rank imports PEFT
@pytest.mark.parametrize(("world", "layout", "kind"), [(2, {"tp": 2}, "llama"), (2, {"nodes": 2}, "gpt2")])
def test_disabled_adapters_give_the_base_and_saved_adapters_reload(saved, tmp_path, world, layout, kind):
    ranks(world).run(check_reference, Case(model=MODELS[kind], **layout), saved(kind), str(tmp_path))


@pytest.mark.parametrize("layout", [{"tp": 2}, slow({"tp": 2, "sequence_parallel": True})])
def test_dropout_masks_agree_over_tp_and_in_recomputation(saved, layout):
    """Train adapters with dropout on two tp ranks, with and without recomputation. All steps must be equal.

    A new dropout mask in a recomputed layer would change its gradients.
    """
    lora, case = dataclasses.replace(ALL, lora_dropout=0.3), Case(model=LLAMA_STYLE, **layout)
    again = dataclasses.replace(case, model=dataclasses.replace(LLAMA_STYLE, **RECOMPUTED))
    one, other = (ranks(2).run(train_on_ranks, each, lora, saved("llama")) for each in (case, again))
    assert one[0]["steps"] == one[1]["steps"] == other[0]["steps"] == other[1]["steps"]
    torch.testing.assert_close(one[0]["dropped"], one[1]["dropped"])
    # In the first step, matrix B of each adapter is zero, so dropout has no effect on the loss. In the last step, B is
    # not zero, so the losses with and without dropout differ.
    assert abs(one[0]["steps"][0][0] - in_one_process("llama", saved("llama"))[0][0]) < 1e-5
    assert abs(one[0]["steps"][-1][0] - in_one_process("llama", saved("llama"))[-1][0]) > 1e-4


def test_adapter_adds_its_product_times_alpha_over_rank():
    layer = GPTModel(LLAMA_STYLE, vocab_size=101)
    add_adapters(layer, adapter_settings(dataclasses.replace(ALL, lora_alpha=12.0), LLAMA_STYLE), None)
    adapter = layer.get_submodule("layers.0.mlp.fc2.adapter").to_empty(device=CPU)
    with torch.no_grad():
        x = torch.rand(3, 2, adapter.a.shape[0])
        adapter.a.copy_(torch.rand_like(adapter.a))
        adapter.b.copy_(torch.rand_like(adapter.b))
        torch.testing.assert_close(adapter(x), 4.0 * (x @ adapter.a @ adapter.b.t()))


def test_file_of_an_adapter_is_found_in_both_of_pefts_formats(tmp_path):
    (tmp_path / "adapter_model.bin").touch()
    assert tensors_file(tmp_path) == tmp_path / "adapter_model.bin"
    (tmp_path / "adapter_model.safetensors").touch()
    assert tensors_file(tmp_path) == tmp_path / "adapter_model.safetensors"


def load_another(case: Case, load: str, folder: str, other: str) -> None:
    """Save adapters of one base, and load them onto another base, which must be rejected."""
    policy, dims = adapt(case, ALL, load)
    save_adapter(policy, Path(folder), dims)
    adapt(case, dataclasses.replace(ALL, lora_load=folder), other)


@pytest.mark.slow
def test_adapters_of_another_base_are_rejected(saved, tmp_path):
    case, other = Case(model=LLAMA_STYLE), str(tmp_path / "other")
    ranks(2).run(run, dataclasses.replace(case, seed=8), 1, save=other)
    row = (case, saved("llama"), str(tmp_path), other, f": its base was {saved('llama')}")
    assert ranks(2).run(not_refused, [row], load_another) == [[], []]
