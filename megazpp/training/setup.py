"""Build the sharded model of a run, and open its data loaders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from megazpp.data.config import DataConfig
from megazpp.data.dataset import batch_options
from megazpp.data.loader import BatchLoader, Dataset, make_micro_batch
from megazpp.data.tokenizer import Tokenizer
from megazpp.model.backends import compiles_layers, find_document_kernel, find_grouped_product, find_product
from megazpp.model.gpt import GPTModel
from megazpp.model.layer_parts import LayerSettings, SharedGenerator
from megazpp.parallel.axis import MeshAxis
from megazpp.parallel.dims import ParallelDims
from megazpp.tensor_parallel.initialize import distribute_parameters, initialize_parameters_, share_parameters_
from megazpp.training.batches import BatchPlan
from megazpp.training.config import ModelSpec
from megazpp.zero.sharding import Sharding, shard_model


class ShardedModel(NamedTuple):
    """A sharded model and the handle to its shards."""

    model: GPTModel
    sharding: Sharding


def build_model(spec: ModelSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """Build the model on the meta device, shard it, then allocate and initialize only this rank's shards.

    All copies of the model (HSDP, replica groups) get equal weights.

    Args:
        spec: description of the model.
        dims: mesh axes of the job.
        device: device on which the model runs.
    """
    return fill(shard_built(model_on_meta(spec, dims, device), spec, dims), spec, dims, device)


def fill(built: ShardedModel, spec: ModelSpec, dims: ParallelDims, device: torch.device) -> ShardedModel:
    """Allocate and initialize this rank's shards of a sharded model that is on the meta device, and return the model.

    All copies of the model (HSDP, replica groups) get equal weights.

    Args:
        built: the sharded model on the meta device.
        spec: description of the model.
        dims: mesh axes of the job.
        device: device on which the model runs.
    """
    built.sharding.states.allocate(built.model, device, dims.world)
    draw_device = torch.device("cpu") if spec.config.use_cpu_initialization else device
    initialize_parameters_(built.model, seed=spec.seed, draw_device=draw_device)
    with dims.counter.paused():  # the log reports only the traffic of training steps
        share_parameters_(built.model, dims.replicate, dims.replica_group, tp=dims.tp, device=device)
        built.sharding.states.refresh()
    return built


def model_on_meta(
    spec: ModelSpec, dims: ParallelDims, device: torch.device, *, whole_experts: bool = False
) -> GPTModel:
    """Build this tensor-parallel rank's slices of the model on the meta device, where weights take no memory.

    Args:
        spec: description of the model.
        dims: mesh axes of the job.
        device: device on which the model will run.
        whole_experts: True gives this rank all experts of each layer, as frozen models need. False gives it the experts
            of its expert-parallel rank.
    """
    config, dtype = spec.config, spec.precision.param_dtype
    # Some settings create process groups or compute, so they are made outside of the context of the meta device.
    settings = LayerSettings(
        tp=dims.tp,
        cp=dims.cp,
        ep=dims.experts.tp if config.num_experts and not whole_experts else MeshAxis("ep"),
        sequence_parallel=spec.sequence_parallel,
        generator=SharedGenerator(device, seed=spec.seed, data_rank=dims.dropout_rank),
        document_kernel=find_document_kernel(config, device, dtype),
        product=spec.product or find_product(config, device),
        grouped=find_grouped_product(config, device, dtype),
        compiled=compiles_layers(config, device.type)[0],
        varying_sizes=spec.varying_sizes,
        device=device,
    )
    with torch.device("meta"):
        return GPTModel(spec.config, settings, vocab_size=spec.vocab_size, scalar_head=spec.scalar_head)


def shard_built(model: GPTModel, spec: ModelSpec, dims: ParallelDims) -> ShardedModel:
    """Shard the parameters of a model on the meta device over the data axes, and return the model with its handle.

    Weights that are plain tensors instead of parameters are not sharded here. LoRA's frozen base weights, for example,
    are such tensors (packed_weights/frozen.py).

    Args:
        model: the model on the meta device.
        spec: description of the model.
        dims: mesh axes of the job.
    """
    experts = [unit for unit in model.expert_units() if any(True for _ in unit.parameters())]
    distribute_parameters(model, dims.tp_mesh, dims.experts.tp_mesh if experts else None)
    units = [unit for unit in model.sharding_units() if any(True for module in unit for _ in module.parameters())]
    states = None if spec.states is None else spec.states()
    sharding = shard_model(
        model, units, dims, zero=spec.zero, precision=spec.precision, wire=spec.wire, experts=experts, states=states
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
    make_batch: Callable[[torch.Tensor], Any] | None = None,
) -> BatchLoader:
    """Return the loader of this rank's micro-batches from a dataset.

    Args:
        dataset: samples of token ids.
        config: the data flags.
        tokenizer: tokenizer whose special token ids the batches need.
        plan: batch sizes.
        dims: mesh axes of the job.
        device: device to which batches are copied.
        ramp_up: True for a training loader: the batch size follows the plan's ramp-up, and a global batch is split over
            the ranks of all jobs of the run (elastic DiLoCo). False for held-out data: a global batch always has the
            full size, and is split over the ranks of this job.
        make_batch: function from samples to a micro-batch; None for `make_micro_batch` with the flags of `config`.
    """
    return BatchLoader(
        dataset,
        micro_batch_size=plan.micro_batch_size,
        data_rank=dims.data_rank,
        data_size=plan.data_parallel_size if ramp_up else dims.data_size,
        make_batch=make_batch or functools.partial(make_micro_batch, **batch_options(config, tokenizer)),
        device=device,
        num_workers=config.num_workers,
        batch_size_at=plan.batch_size_at if ramp_up else None,
    )
