"""LoRA over ranks: adapters train as in one plain process, on a base that is frozen and is its own reference."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import frozen_place, run
from helpers.ranks import ranks
from helpers.refusals import not_refused
from helpers.tiers import slow
from helpers.training import CPU, GPT2_STYLE, LLAMA_STYLE, Case, build_on_ranks, dims_on_ranks, spec_of
from helpers.training import train_on_ranks as train_all

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import find_weights, load_weights
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.optim.loss_scale import LossScaleConfig, build_loss_scaler
from megazpp.optim.optimizer import OptimizerConfig, build_optimizer
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.post_training.lora import AdaptedPolicy, LoraConfig, add_adapters, load_adapted, save_adapter
from megazpp.stored.format import plan_rows
from megazpp.tensor_parallel.lora import adapters_off
from megazpp.tensor_parallel.parameters import initialize_parameters_
from megazpp.training.step import TrainStep

STEPS = 4
ALL = LoraConfig(lora_r=3, lora_alpha=6.0, lora_target_modules=("all-linear",))
WIDE = dataclasses.replace(LLAMA_STYLE, hidden_size=128, kv_channels=16, ffn_hidden_size=256)
MODELS = {"gpt2": GPT2_STYLE, "llama": LLAMA_STYLE, "wide": WIDE}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def loads(tmp_path_factory) -> dict[str, str]:
    """Checkpoints of models: wide ones have rows of several blocks, on each of two tensor-parallel ranks too."""
    found = {kind: str(tmp_path_factory.mktemp(kind) / "save") for kind in MODELS}
    for kind, folder in found.items():
        case = Case(model=MODELS[kind], tp=2)
        ranks(2).run(run, case, 1, save=folder)
    return found


def adapt(case: Case, lora: LoraConfig, load: str, **options: bool) -> tuple[AdaptedPolicy, ParallelDims]:
    dims = dims_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    return load_adapted(spec_of(case), lora, frozen_place(dims), source, record, **options), dims


def train(policy: AdaptedPolicy, dims: ParallelDims, case: Case) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    model = policy.built.model
    optimizer = build_optimizer(list(model.named_parameters()), OptimizerConfig(), CPU)
    step = TrainStep(*policy.built, optimizer, build_loss_scaler(LossScaleConfig(), fp16=False), dims, clip_grad=0.5)
    size, results = case.global_batch // dims.data_size // case.micro_batches, []
    for index in range(STEPS):
        firsts = [(m * dims.data_size + dims.data_rank) * size for m in range(case.micro_batches)]
        result = step(
            [case.batch(index, first, size) for first in firsts], learning_rate=case.learning_rate, weight_decay=0.01
        )
        results.append((result.loss, result.grad_norm))
    return results


def train_on_ranks(case: Case, lora: LoraConfig, load: str) -> dict[str, Any]:
    policy, dims = adapt(case, lora, load)
    trained = [name for name, _ in policy.built.model.named_parameters()]
    sent = dims.counter.sent_bytes("cross")
    results = train(policy, dims, case)
    return {
        "steps": results,
        "trained": trained,
        "unpacked": [u.name for u in policy.base.units if u.is_unpacked],
        "checksum": policy.settings.checksum,
        "cross": dims.counter.sent_bytes("cross") - sent,
    }


@functools.cache
def in_one_process(kind: str, load: str, bits: Any = None) -> list[tuple[float, float]]:
    lora = dataclasses.replace(ALL, base_weight_bits=bits)
    return ranks(1).run(train_plain, Case(model=MODELS[kind]), lora, load)[0]


def train_plain(case: Case, lora: LoraConfig, load: str) -> list[tuple[float, float]]:
    """The reference: one rank's whole model, torch's own clipping and optimizer, base without gradients."""
    base, sharding, dims = build_on_ranks(case)
    source, record = find_weights(CheckpointFolder(load, "--load"), None)
    load_weights(base, sharding, dims, source, record, vocab_size=case.vocab_size, say=lambda line: None)
    weights = {name: p.detach().full_tensor() for name, p in base.named_parameters()}
    if lora.base_weight_bits is not None:
        for name, weight in weights.items():
            if weight.dim() == 2:
                rows = plan_rows(weight.shape[1], lora.base_weight_bits)
                weights[name] = rows.unpack(rows.pack(weight), torch.empty_like(weight))
    model = GPTModel(case.model, vocab_size=case.vocab_size, tp=MeshAxis("tp"))
    model.load_state_dict(weights)
    model.requires_grad_(False)
    add_adapters(model, lora.settings(case.model), SharedGenerator(CPU, seed=1, data_rank=0))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device=CPU)))
    initialize_parameters_(model, seed=case.seed, draw_device=CPU)
    model.load_state_dict(weights, strict=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=case.learning_rate, betas=(0.9, 0.999), weight_decay=0.01)
    results = []
    for index in range(STEPS):
        batch = case.batch(index, 0, case.global_batch)
        losses = model(batch.tokens, batch.labels, position_ids=batch.position_ids)
        loss = (losses * batch.loss_mask).sum() / batch.loss_mask.sum()
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(trained, 0.5))
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm))
    return results


@pytest.mark.parametrize(
    ("world", "kind", "layout", "recompute"),
    [
        (4, "llama", {"nodes": 2, "micro_batches": 2}, {}),
        (2, "gpt2", {"tp": 2, "sequence_parallel": True}, {}),
        (2, "llama", {"tp": 2}, {}),
        slow(4, "llama", {"tp": 4, "sequence_parallel": True}, RECOMPUTED),
        slow(4, "gpt2", {"tp": 2, "nodes": 2}, RECOMPUTED),
        slow(8, "llama", {"tp": 2, "nodes": 2, "sequence_parallel": True}, {}),
        slow(1, "gpt2", {}, RECOMPUTED),
        slow(2, "gpt2", {"stage": 0}, {}),
        slow(2, "llama", {"stage": 2, "micro_batches": 2}, RECOMPUTED),
    ],
)
def test_adapters_train_as_in_one_process(loads, world, kind, layout, recompute):
    """fp32 sums in another order over the steps: 1e-5."""
    model, expected = dataclasses.replace(MODELS[kind], **recompute), in_one_process(kind, loads[kind])
    results = ranks(world).run(train_on_ranks, Case(model=model, **layout), ALL, loads[kind])
    for found in results:
        torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert all(".adapter." in name for name in found["trained"])
        assert len(found["trained"]) == 2 * model.layers * (4 if kind == "gpt2" else 7)
        assert found["unpacked"] == []
    assert len({found["checksum"] for found in results}) == 1


@pytest.mark.parametrize(
    ("bits", "world", "layout"),
    [
        (8, 2, {"tp": 2, "sequence_parallel": True}),
        (4, 2, {"nodes": 2}),
        slow(4, 2, {"tp": 2, "sequence_parallel": True}),
        slow(8, 4, {"nodes": 2}),
        slow(16, 4, {"tp": 2, "nodes": 2}),
    ],
)
def test_on_a_rounded_base_adapters_train_as_on_the_same_weights_unpacked_on_every_layout(loads, bits, world, layout):
    lora = dataclasses.replace(ALL, base_weight_bits=bits)
    expected, exact = (in_one_process("wide", loads["wide"], each) for each in (bits, None))
    for found in ranks(world).run(train_on_ranks, Case(model=WIDE, **layout), lora, loads["wide"]):
        torch.testing.assert_close(torch.tensor(found["steps"]), torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert found["unpacked"] == []
    assert abs(expected[0][0] - exact[0][0]) > 3e-5  # so that an exact base would not pass


def compare_reference(case: Case, load: str, folder: str) -> tuple[bool, ...]:
    """Whether new adapters change nothing; trained ones do; off, nothing again; files bring them back; and trained
    further, they are off what they were in the files."""
    policy, dims = adapt(case, ALL, load)
    model = policy.built.model
    batch = case.batch(9, dims.data_rank, 1)

    def losses(of: AdaptedPolicy) -> torch.Tensor:
        with torch.no_grad():
            found = of.built.model.eval()(batch.tokens, batch.labels)
        of.built.sharding.free_gathered()
        return found

    with adapters_off(model):
        base = losses(policy)
    new = losses(policy)
    train(policy, dims, case)
    trained = losses(policy)
    with adapters_off(model):
        again = losses(policy)
    save_adapter(policy, Path(folder), dims)
    dims.world.share_object(None)
    other, _ = adapt(case, dataclasses.replace(ALL, lora_load=folder, lora_dropout=0.5), load, keep_reference=True)
    back = losses(other)
    train(other, dims, case)
    further = losses(other)
    with adapters_off(other.built.model.train()):
        reference = losses(other)
    return (
        torch.equal(base, new),
        not torch.allclose(base, trained, atol=1e-3),
        torch.equal(base, again),
        torch.equal(trained, back),
        not torch.allclose(back, further, atol=1e-3),
        torch.equal(back, reference),
    )


@pytest.mark.parametrize(
    ("world", "layout", "kind"), [(2, {"tp": 2}, "llama"), (2, {"nodes": 2}, "gpt2"), slow(4, {"tp": 2}, "gpt2")]
)
def test_with_adapters_off_it_is_the_base_and_adapters_come_back_from_their_files(loads, tmp_path, world, layout, kind):
    case = Case(model=MODELS[kind], **layout)
    assert ranks(world).run(compare_reference, case, loads[kind], str(tmp_path)) == [(True,) * 6] * world


@pytest.mark.parametrize("layout", [{"tp": 2}, slow({"tp": 2, "sequence_parallel": True})])
def test_masks_of_dropout_agree_over_tp_and_in_recomputation(loads, layout):
    """Were they drawn anew, the gradients of a recomputed layer would be other ones."""
    lora, case = dataclasses.replace(ALL, lora_dropout=0.3), Case(model=LLAMA_STYLE, **layout)
    again = dataclasses.replace(case, model=dataclasses.replace(LLAMA_STYLE, **RECOMPUTED))
    one, other = (ranks(2).run(train_on_ranks, each, lora, loads["llama"]) for each in (case, again))
    assert one[0]["steps"] == one[1]["steps"] == other[0]["steps"] == other[1]["steps"]
    assert abs(one[0]["steps"][0][0] - in_one_process("llama", loads["llama"])[0][0]) < 1e-5  # B is zero yet
    assert abs(one[0]["steps"][-1][0] - in_one_process("llama", loads["llama"])[-1][0]) > 1e-4


def sent_by_full_training(case: Case) -> int:
    return train_all(dataclasses.replace(case, steps=STEPS))["sent"]["cross"]


def test_between_nodes_only_adapters_travel(loads):
    case = Case(model=LLAMA_STYLE, nodes=2)
    small = sum(found["cross"] for found in ranks(2).run(train_on_ranks, case, LoraConfig(lora_r=1), loads["llama"]))
    large = sum(ranks(2).run(sent_by_full_training, case))
    assert 0 < small < large / 20


def test_an_adapter_adds_alpha_over_rank_of_its_product():
    layer = GPTModel(LLAMA_STYLE, vocab_size=101, tp=MeshAxis("tp"))
    add_adapters(layer, dataclasses.replace(ALL, lora_alpha=12.0).settings(LLAMA_STYLE), None)
    adapter = layer.get_submodule("layers.0.mlp.fc2.adapter").to_empty(device=CPU)
    with torch.no_grad():
        x = torch.rand(3, 2, adapter.a.shape[0])
        adapter.a.copy_(torch.rand_like(adapter.a))
        adapter.b.copy_(torch.rand_like(adapter.b))
        torch.testing.assert_close(adapter(x), 4.0 * (x @ adapter.a @ adapter.b.t()))


def test_settings_that_cannot_be_are_refused():
    rows = [
        (17, ("k_proj",), "--lora-r 17 is more than the smaller side of model.layers.0.self_attn.k_proj, 16"),
        (1, ("q_proj", "lm_head"), "--lora-target-modules lm_head is no linear"),
    ]
    assert (
        not_refused(rows, lambda r, names: LoraConfig(lora_r=r, lora_target_modules=names).settings(LLAMA_STYLE)) == []
    )


def load_another(case: Case, load: str, folder: str, other: str) -> str:
    """The error of adapters that are saved and go on with other weights."""
    policy, dims = adapt(case, ALL, load)
    save_adapter(policy, Path(folder), dims)
    with pytest.raises(ValueError, match="--lora-load") as caught:
        adapt(case, dataclasses.replace(ALL, lora_load=folder), other)
    return str(caught.value)


def test_adapters_of_another_base_are_refused(loads, tmp_path):
    case, other = Case(model=LLAMA_STYLE), str(tmp_path / "other")
    ranks(1).run(run, dataclasses.replace(case, seed=8), 1, save=other)
    (message,) = ranks(1).run(load_another, case, loads["llama"], str(tmp_path), other)
    assert "was trained on weights with checksum" in message
    assert message.endswith(f": its base was {loads['llama']}")
