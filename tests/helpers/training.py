"""Train a tiny GPT on synthetic samples: in one process as a reference, or on ranks with the package's own code."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megazpp.data.loader import MicroBatch, make_micro_batch
from megazpp.diloco.config import DilocoConfig, DilocoPlan, plan_diloco
from megazpp.diloco.outer import ReplicaGroups
from megazpp.host_states.states import HostStates
from megazpp.model.config import GPTConfig
from megazpp.model.float8 import Float8Format, float8_product
from megazpp.model.gpt import GPTModel
from megazpp.optim.build import build_optimizer
from megazpp.optim.config import LossScaleConfig, OptimizerConfig
from megazpp.optim.optimizer import LossScaler
from megazpp.parallel.config import ParallelConfig
from megazpp.parallel.dims import ParallelDims, plan_dims
from megazpp.parallel.worker import seed_everything
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.tensor_parallel.layers import Product
from megazpp.topology.cluster import Cluster
from megazpp.topology.layout import Layout
from megazpp.training.config import ModelSpec
from megazpp.training.setup import build_model
from megazpp.training.step import TrainStep
from megazpp.zero.config import CommPlan, PrecisionConfig, ZeroConfig
from megazpp.zero.plan import plan_comm

EOD = 3
CPU = torch.device("cpu")
CLIP = 0.5

GPT2_STYLE = GPTConfig(
    num_layers=2,
    hidden_size=20,  # neither 20 nor the vocabulary of 101 is a multiple of 8 ranks or of a block size
    num_attention_heads=4,
    ffn_hidden_size=44,
    max_position_embeddings=16,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    make_vocab_size_divisible_by=1,
)
LLAMA_STYLE = replace(
    GPT2_STYLE,
    hidden_size=24,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=4,
    kv_channels=4,
    ffn_hidden_size=36,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    make_vocab_size_divisible_by=8,
)

MIXTURE_STYLE = replace(LLAMA_STYLE, num_layers=1, num_experts=4, moe_ffn_hidden_size=20, moe_aux_loss_coeff=0.01)
BIASED_STYLE = replace(
    MIXTURE_STYLE,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.05,
)


def packed_documents(vocab_size: int, seq: int, ends: list[tuple[int, int]]) -> MicroBatch:
    """Return a micro-batch of three rows of documents whose last tokens are at `ends`, as (row, token) pairs.

    The last document of a row may be cut off at the end of the row.
    """
    ids = torch.randint(EOD + 1, vocab_size, (3, seq + 1), generator=torch.Generator().manual_seed(4))
    for row, end in ends:
        ids[row, end] = EOD
    return make_micro_batch(ids, eod=EOD, reset_position_ids=True, reset_attention_mask=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """The configuration of one training run of a tiny GPT, whose samples depend only on the step.

    Most attributes have the name of a flag or of an axis. The others are:

    Attributes:
        stage: --zero-stage, if `zero` is None.
        micro_batches: micro-batches per step.
        replicas: --num-distributed-optimizer-instances.
        nodes: number of emulated nodes over which the ranks are spread.
        order: rank at each position of the cluster; None if each rank's number equals its position.
        steps: number of training steps.
        documents: True if attention, positions and the loss end at the end-of-document token.
        global_batch: samples per step.
    """

    model: GPTConfig = GPT2_STYLE
    tp: int = 1
    cp: int = 1
    ep: int = 1
    stage: int = 3
    sequence_parallel: bool = False
    micro_batches: int = 1
    replicas: int = 1
    nodes: int = 1
    order: tuple[int, ...] | None = None
    steps: int = 3
    documents: bool = False
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    vocab_size: int = 101
    seq_length: int = 16
    global_batch: int = 16
    seed: int = 5
    learning_rate: float = 1e-2
    zero: ZeroConfig | None = None
    # format of the linear layers' float8 matrix products, which are emulated; None for products in the compute dtype
    float8: Float8Format | None = None
    scalar_head: bool = False
    diloco: DilocoConfig = field(default_factory=DilocoConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def num_replica_groups(self) -> int:
        return 1 if self.diloco.diloco_steps is None else self.diloco.diloco_replica_groups or self.nodes

    @property
    def product(self) -> Product | None:
        """Function that multiplies matrices in linear layers; None for torch's own matrix product."""
        return None if self.float8 is None else float8_product(self.float8, emulate=True)

    def batch(self, step: int, first: int, count: int) -> MicroBatch:
        """Return `count` samples of the step's global batch as a micro-batch, beginning with sample `first`."""
        generator = torch.Generator().manual_seed(1000 + step)
        uniform = torch.rand(self.global_batch, self.seq_length + 1, generator=generator)
        # a skewed distribution of tokens, so that the model can learn frequencies and its loss falls
        samples = (self.vocab_size * uniform**4).long()
        ends = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), self.documents)
        return make_micro_batch(samples[first : first + count], eod=EOD, **ends)

    def batches(self, step: int, dims: ParallelDims) -> list[MicroBatch]:
        """Return the micro-batches that this data-parallel rank processes in a step."""
        size = self.global_batch // dims.data_size // self.micro_batches
        firsts = ((m * dims.data_size + dims.data_rank) * size for m in range(self.micro_batches))
        return [self.batch(step, first, size) for first in firsts]


@dataclass
class FixedBatches:
    """Fake data loader, which returns the same micro-batches in every step."""

    batches: list[MicroBatch]

    def step(self, consumed_samples: int, global_batch_size: int) -> list[MicroBatch]:
        return self.batches


def train_plain(case: Case) -> dict[str, list[float]]:
    """Train in one process as the reference for sharded runs, and return the loss and the gradient norm of each step.

    The reference uses no sharding, torch's own gradient clipping, and the complete global batch at once.
    """
    model = GPTModel(case.model, vocab_size=case.vocab_size)
    initialize_parameters_(model, seed=case.seed, draw_device=CPU)
    decay = [p for p in model.parameters() if p.dim() > 1]
    no_decay = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=case.learning_rate, betas=(0.9, 0.999))
    losses, norms = [], []
    for step in range(case.steps):
        batch = case.batch(step, 0, case.global_batch)
        values = model(
            batch.tokens, batch.labels, position_ids=batch.position_ids, document_starts=batch.document_starts
        )
        loss = (values * batch.loss_mask).sum() / batch.loss_mask.sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"loss": losses, "grad_norm": norms}


def dims_on_ranks(case: Case) -> ParallelDims:
    world = torch.distributed.get_world_size()
    cluster = Cluster(num_nodes=case.nodes, ranks_per_node=world // case.nodes, order=case.order)
    config = ParallelConfig(
        tensor_model_parallel_size=case.tp,
        context_parallel_size=case.cp,
        allow_cp_across_nodes=case.cp * case.tp * case.nodes > world,
        num_distributed_optimizer_instances=case.replicas,
        expert_model_parallel_size=case.ep,
    )
    dims = ParallelDims(
        plan_dims(config, cluster, zero_stage=case.stage, num_replica_groups=case.num_replica_groups), device_type="cpu"
    )
    seed_everything(case.seed, data_rank=dims.dropout_rank, tp_rank=dims.tp.rank)
    return dims


def wire_of(case: Case, layout: Layout) -> CommPlan:
    return plan_comm(case.zero or ZeroConfig(zero_stage=case.stage), layout, case.precision.param_dtype)


def spec_of(case: Case, wire: CommPlan = CommPlan()) -> ModelSpec:  # noqa: B008, immutable, so calls may share it
    return ModelSpec(
        config=case.model,
        vocab_size=case.vocab_size,
        sequence_parallel=case.sequence_parallel,
        zero=case.zero or ZeroConfig(zero_stage=case.stage),
        wire=wire,
        precision=case.precision,
        seed=case.seed,
        scalar_head=case.scalar_head,
        product=case.product,
        states=HostStates if case.zero is not None and case.zero.optimizer_cpu_offload else None,
    )


def build_on_ranks(case: Case) -> tuple[GPTModel, Any, ParallelDims]:
    dims = dims_on_ranks(case)
    return *build_model(spec_of(case, wire_of(case, dims.layout)), dims, CPU), dims


def build_step(case: Case) -> tuple[TrainStep, ParallelDims]:
    model, sharding, dims = build_on_ranks(case)
    settings = {"dims": dims, "dtype": case.precision.param_dtype, "adamw": sharding.states.adamw}
    optimizer = build_optimizer(model, case.optimizer, **settings)
    scaler = LossScaler(LossScaleConfig(initial_loss_scale=2.0**12), fp16=case.precision.fp16)
    return TrainStep(model, sharding, optimizer, scaler, dims, clip_grad=CLIP), dims


def diloco_plan(case: Case) -> DilocoPlan | None:
    """Return the plan of DiLoCo's local steps, or None for a training without DiLoCo."""
    return plan_diloco(
        case.diloco,
        case.zero or ZeroConfig(),
        iterations=case.steps,
        num_layers=case.model.num_layers,
        tokens_per_step=case.global_batch * case.seq_length / case.num_replica_groups,
    )


def build_diloco(case: Case, step: TrainStep, dims: ParallelDims) -> ReplicaGroups | None:
    """Build the outer weights of DiLoCo for the model of `step`, or return None for a training without DiLoCo."""
    plan = diloco_plan(case)
    return None if plan is None else ReplicaGroups(step.sharding, dims, plan, case.precision)


def train_on_ranks(case: Case) -> dict[str, Any]:
    """Train with the package's own code on the ranks of this process group, and return the results of this rank.

    Returns:
        "loss" and "grad_norm" per step, "skipped" (number of skipped steps), "sent" (bytes by wire), and
        "shard_elements" (size of this rank's shard of the parameters).
    """
    step, dims = build_step(case)
    losses, norms, skipped = [], [], 0
    for index in range(case.steps):
        result = step(case.batches(index, dims), learning_rate=case.learning_rate, weight_decay=0.01)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        skipped += result.skipped
    sent = {wire: dims.counter.sent_bytes(wire) for wire in ("tp", "local", "cross")}
    found = {"loss": losses, "grad_norm": norms, "skipped": skipped, "sent": sent}
    return found | {"shard_elements": step.sharding.shard_elements}
