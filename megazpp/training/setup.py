"""Build the model of a run, in shards, and load its batches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from megazpp.data.dataset import DataConfig, batch_options
from megazpp.data.loader import BatchLoader, Dataset, make_micro_batch
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.backends import compiles_layers, find_document_kernel, find_product
from megazpp.model.config import GPTConfig
from megazpp.model.dropout import SharedGenerator
from megazpp.model.gpt import GPTModel
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.layers import Product
from megazpp.tensor_parallel.parameters import distribute_parameters, initialize_parameters_, share_parameters_
from megazpp.training.batches import BatchPlan
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig
from megazpp.zero.sharding import Sharding, shard_model


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The specification that a model is built from, whatever ranks it is built on.

    Attributes:
        vocab_size: of the tokenizer; the model may pad it.
        wire: the run's plan of what replaces FSDP2's collectives; None: the plan of `zero` on the layout.
        seed: of the initial weights and of dropout.
        product: what linear layers multiply with, whatever the device; None: what `config` asks of the device.
        scalar_head: also have a head that gives each token one number.
        varying_sizes: batches and sequences are not all of one size.
    """

    config: GPTConfig
    vocab_size: int
    sequence_parallel: bool = False
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    wire: CommPlan | None = None
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    seed: int
    product: Product | None = None
    scalar_head: bool = False
    varying_sizes: bool = False


class ShardedModel(NamedTuple):
    """A model in shards and the handle on them."""

    model: GPTModel
    sharding: Sharding


def build_model(spec: ModelSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """Build on the meta device, shard, then allocate and initialise this rank's shards only; copies are equal."""
    return fill(shard_on_meta(spec, dims, device), spec, dims, device)


def fill(built: ShardedModel, spec: ModelSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """Allocate and initialise this rank's shards; copies are equal."""
    built.model.to_empty(device=device)
    draw_device = torch.device("cpu") if spec.config.use_cpu_initialization else device
    initialize_parameters_(built.model, seed=spec.seed, draw_device=draw_device)
    with dims.counter.paused():  # no step sends this
        share_parameters_(built.model, dims.replicate, dims.island, tp=dims.tp)
    return built


def shard_on_meta(spec: ModelSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """The model in shards that have no memory yet; `device` is where it will run."""
    return shard_built(model_on_meta(spec, dims, device), spec, dims)


def model_on_meta(spec: ModelSpec, dims: ParallelDims, device: torch.device) -> GPTModel:
    """This tensor-parallel rank's part of the model, without memory; `device` is where it will run."""
    product = spec.product or find_product(spec.config, device)
    ep = dims.experts.tp if spec.config.num_experts else None  # makes groups, which needs tensors with values
    with torch.device("meta"):
        return GPTModel(
            spec.config,
            vocab_size=spec.vocab_size,
            tp=dims.tp,
            cp=dims.cp,
            ep=ep,
            sequence_parallel=spec.sequence_parallel,
            shared_generator=SharedGenerator(device, seed=spec.seed, data_rank=dims.dropout_rank),
            document_kernel=find_document_kernel(spec.config, device, spec.precision.param_dtype),
            product=product,
            scalar_head=spec.scalar_head,
            compiled=compiles_layers(spec.config, device.type)[0],
            varying_sizes=spec.varying_sizes,
        )


def shard_built(model: GPTModel, spec: ModelSpec, dims: ParallelDims) -> ShardedModel:
    """Shard the parameters of a model on the meta device, which may be fewer than it was built with."""
    experts = model.expert_units()
    distribute_parameters(model, dims.tp_mesh, dims.experts.tp_mesh if experts else None)
    units = [unit for unit in model.sharding_units() if any(True for module in unit for _ in module.parameters())]
    sharding = shard_model(
        model, units, dims, zero=spec.zero, precision=spec.precision, wire=spec.wire, experts=experts
    )
    return ShardedModel(model, sharding)


def open_loader(
    dataset: Dataset,
    config: DataConfig,
    tokenizer: Tokenizer,
    plan: BatchPlan,
    dims: ParallelDims,
    device: torch.device,
    *,
    ramp_up: bool,
) -> BatchLoader:
    """This rank's batches of `dataset`; `ramp_up` where the batch size follows the plan rather than staying full."""
    return BatchLoader(
        dataset,
        micro_batch_size=plan.micro_batch_size,
        data_rank=dims.data_rank,
        data_size=dims.data_size,
        make_batch=functools.partial(make_micro_batch, **batch_options(config, tokenizer)),
        device=device,
        num_workers=config.num_workers,
        batch_size_at=plan.batch_size_at if ramp_up else None,
    )
