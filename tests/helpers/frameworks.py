"""Train in several frameworks (accelerate, torchtitan, Trainer, TRL) on plain FSDP2 and with ZeRO++, and compare.

A scenario defines additional actions around the steps of a training, such as an evaluation between micro-batches. A
framework is a function that trains a small Llama on FSDP2 and calls the scenario's methods, in callbacks if the
framework has its own loop. `compare` runs one framework with one scenario on the ranks of helpers/ranks.py.

Two cases are not covered:

- Ranks that call different layers. Plain FSDP2 would pair collectives of different layers, and time out or mix up
  weights of equal shape. In "layer drop by rank" all ranks call all layers instead.
- A discarded first micro-batch in accelerate, the Trainer or TRL. These frameworks accumulate with
  `set_requires_gradient_sync`, so FSDP2 keeps the gradients over `zero_grad`. The scenario "discarded batch" checks
  that ZeRO++ keeps them as well. It also discards the gradients of a whole step.
"""

import copy
import dataclasses
import functools
import importlib
import os
import random
import string
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import megazpp

STEPS, LENGTH = 4, 12
EXACT = megazpp.ZeroConfig(zeropp=True, zero_weight_bits=16, zero_gradient_bits=(16, 16), zero_error_feedback=False)
Connect = Callable[[nn.Module], Any]


# ---- scenarios: additional actions around the steps of a training ---------------------------------------------------


class Training:
    """One training of a small Llama in a framework on this rank, with the actions of a scenario.

    Args:
        scenario: actions around the steps of the training.
        evaluate: function that runs an evaluation and returns its mean loss.

    Attributes:
        model: the model that FSDP2 has wrapped; None until the training begins.
        losses: losses of all micro-batches and evaluations, in order.
    """

    def __init__(self, scenario: "Scenario", evaluate: Callable[[], float]) -> None:
        self.scenario, self._evaluate, self.losses, self.num_micro_batches = scenario, evaluate, [], 0
        self.model: Any = None

    def begin(self, model: nn.Module) -> None:
        if self.model is None:
            self.model = model
            self.scenario.begin(self)

    def micro_batch(self) -> None:
        """Run the scenario's action before a micro-batch, and count the micro-batch; call this before each one."""
        self.scenario.before_micro_batch(self)
        self.num_micro_batches += 1

    def evaluate(self) -> None:
        self.losses.append(self._evaluate())

    def reshard(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def blocks(self) -> nn.ModuleList | nn.ModuleDict:
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList | nn.ModuleDict) and len(m) == 2)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the unsharded weights by parameter name.

        In torch 2.11, FSDP2's `reshard` leaves a unit of several modules unsharded if one of them was not called in the
        last forward. This happens in TRL, which computes logits without calling `lm_head`. So some weights may be plain
        tensors instead of DTensors.
        """
        self.reshard()
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {name: w.full_tensor() if isinstance(w, DTensor) else w for name, w in weights.items()}


class Scenario:
    """A training without additional actions, and the base of all scenarios.

    Attributes:
        lora: True to train LoRA adapters on a frozen base.
        accumulate: micro-batches per step.
        calls: number of times that the whole training runs in this process.
    """

    lora, accumulate, calls = False, 1, 1

    def begin(self, training: Training) -> None:
        """Act before the first step, after the optimizer was created.

        The loops below call `megazpp.zeropp` after this method, except `torchtitan_loop`, which calls `zeropp` before.
        """

    def before_step(self, training: Training, step: int) -> None: ...

    def before_micro_batch(self, training: Training) -> None: ...

    def between_micro_batches(self, training: Training, step: int) -> None: ...

    def before_optimizer(self, training: Training, step: int) -> None:
        """Act between a step's last backward and its optimizer step."""

    def after_step(self, training: Training, step: int) -> None: ...


class Lora(Scenario):
    """LoRA: the weights of the base are frozen in bf16, and the trained adapters are fp32."""

    lora, accumulate = True, 2


class UnfrozenHalfway(Scenario):
    """One whole sharding unit and half of another are frozen at first, and trained from the third step on.

    They are frozen only after the optimizer was created, because some frameworks give the optimizer no frozen
    parameters. They are frozen after a first forward, because the first forward of FSDP2 with a bf16 policy needs a
    trainable parameter in each unit.
    """

    def begin(self, training: Training) -> None:
        training.evaluate()
        training.reshard()
        first, second = training.blocks.children()
        for module in (first, next(second.children())):
            module.requires_grad_(False)

    def before_step(self, training: Training, step: int) -> None:
        if step == 2:
            training.model.requires_grad_(True)


class DroppedLayers(Scenario):
    """Layer drop: all ranks skip the same layers, which differ from micro-batch to micro-batch.

    Layer 1 is unused in the whole second step, and layer 0 in the whole third step.
    """

    accumulate = 2
    dropped = ((), (0,), (1,), (1,), (0, 1), (0,), (1,), ())  # indices of the skipped layers in each micro-batch

    def begin(self, training: Training) -> None:
        container = training.blocks
        container.__class__ = type("Dropping", (Dropping, type(container)), {})

    def before_micro_batch(self, training: Training) -> None:
        training.blocks.dropped = self.dropped[training.num_micro_batches]


class Dropping:
    """Mixin for the container of a Llama's layers that hides skipped layers from the model's loop over them.

    transformers loops over `layers[:n]`, and torchtitan over `layers.values()`.
    """

    dropped: Collection[int] = ()

    def kept(self) -> list[nn.Module]:
        return [block for position, block in enumerate(self.children()) if position not in self.dropped]

    def __getitem__(self, index: Any) -> Any:
        return self.kept() if isinstance(index, slice) else super().__getitem__(index)

    def values(self) -> list[nn.Module]:
        return self.kept()


class DroppedByRank(Scenario):
    """Stochastic depth: all ranks call all layers, but each rank ignores the outputs of layers that it draws itself."""

    accumulate = 2

    def begin(self, training: Training) -> None:
        def drop(block: nn.Module, given: Any, output: torch.Tensor, *, position: int) -> torch.Tensor:
            seed = 100 * training.num_micro_batches + 10 * position + dist.get_rank()
            return output if random.Random(seed).random() < 0.5 else given[0] + 0.0 * output

        for position, block in enumerate(training.blocks.children()):
            block.register_forward_hook(functools.partial(drop, position=position))


class SwappedAverage(Scenario):
    """An exponential moving average of the weights is swapped with the weights for each evaluation (EMA)."""

    def begin(self, training: Training) -> None:
        self.average = {name: p.detach().to_local().clone() for name, p in training.model.named_parameters()}

    def after_step(self, training: Training, step: int) -> None:
        training.reshard()
        local = {name: p.detach().to_local() for name, p in training.model.named_parameters()}
        for name, average in self.average.items():
            average.lerp_(local[name], 0.25)
        for _ in range(2):
            kept = {name: p.clone() for name, p in local.items()}
            torch._foreach_copy_(list(local.values()), list(self.average.values()))
            self.average = kept
            training.evaluate()
            training.reshard()


class DiscardedBatch(Scenario):
    """`zero_grad` discards the gradients of step 1's first micro-batch, and later all gradients of step 2."""

    accumulate = 2

    def between_micro_batches(self, training: Training, step: int) -> None:
        if step == 1:
            training.model.zero_grad()

    def before_optimizer(self, training: Training, step: int) -> None:
        if step == 2:
            training.model.zero_grad()


class CalledTwice(Scenario):
    """The whole training runs twice: two calls of a Trainer's `train()`, or of `prepare` and `zeropp` in a loop."""

    calls = 2


class EvaluationBetween(Scenario):
    """The model is evaluated between the micro-batches of a step."""

    accumulate = 2

    def between_micro_batches(self, training: Training, step: int) -> None:
        training.evaluate()


SCENARIOS: dict[str, type[Scenario]] = {
    "LoRA": Lora,
    "unfreezing halfway": UnfrozenHalfway,
    "layer drop": DroppedLayers,
    "layer drop by rank": DroppedByRank,
    "EMA swap": SwappedAverage,
    "discarded batch": DiscardedBatch,
    "train() twice": CalledTwice,
    "evaluation between": EvaluationBetween,
}

# ---- models and data that the frameworks train ----------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))


def with_peft(model: nn.Module) -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(model.to(torch.bfloat16), lora_config())


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def torchtitan_config() -> Any:
    """Return the config of torchtitan's smallest Llama, with two layers of width 32 and a vocabulary of 128 tokens."""
    from torchtitan.models import llama3

    config = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    rope = dataclasses.replace(config.layers[0].attention.rope, dim=8, max_seq_len=64)
    sizes = {"n_layers": 2, "dim": 32, "n_heads": 4, "hidden_dim": 48}
    config.layers = llama3._build_llama3_layers(**sizes, rope=rope, attn_backend="flex")
    config.dim = config.norm.normalized_shape = config.tok_embeddings.embedding_dim = config.lm_head.in_features = 32
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = 128
    return config


def tokens(sample: int) -> torch.Tensor:
    """Return the token IDs [2, LENGTH] of sample number `sample` on this rank; number -1 is the evaluation's sample."""
    generator = torch.Generator().manual_seed(dist.get_world_size() * (sample + 1) + dist.get_rank())
    return torch.randint(128, (2, LENGTH), generator=generator)


def texts(**templates: str) -> Any:
    from datasets import Dataset

    return Dataset.from_list([{k: text.format(n, n + 1) for k, text in templates.items()} for n in range(40)])


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(["<eos>", "<pad>", *string.printable])}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")


# ---- frameworks: functions that train, one per framework ------------------------------------------------------------


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def accelerate_loop(scenario: Scenario, connect: Connect) -> Training:
    """Train with `Accelerator.accumulate`, in which FSDP2 keeps gradients unreduced until the last micro-batch."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=scenario.accumulate, cpu=True)
    model: Any = with_peft(llama()) if scenario.lora else llama()

    def evaluate() -> float:
        with evaluating(model):
            return model(input_ids=tokens(-1), labels=tokens(-1)).loss.item()

    training = Training(scenario, evaluate)
    for _ in range(scenario.calls):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        training.begin(model)
        connect(model)
        for number in range(STEPS * scenario.accumulate):
            step, place = divmod(number, scenario.accumulate)
            if place == 0:
                scenario.before_step(training, step)
            with accelerator.accumulate(model):
                training.micro_batch()
                ids = tokens(training.num_micro_batches)
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                training.losses.append(loss.item())
                last = accelerator.sync_gradients
                (scenario.before_optimizer if last else scenario.between_micro_batches)(training, step)
                if last:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                if last:
                    scenario.after_step(training, step)
    return training


def torchtitan_loop(scenario: Scenario, connect: Connect) -> Training:
    """Train torchtitan's Llama as torchtitan does: built on meta, sharded by `parallelize_llama`, in bf16.

    The loop does not tell FSDP2 which backward is the last of a step, so every backward reduces gradients.
    """
    from torchtitan.components.lora import LoRAConverter
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import clip_grad_norm_
    from torchtitan.models.llama3 import parallelize_llama

    config = torchtitan_config()
    if scenario.lora:
        config = LoRAConverter.Config(rank=4, alpha=8.0, target_modules=["wo", "w2"]).build().convert(config)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    how: dict[str, Any] = {"parallelism": parallelism, "training": TrainingConfig(seq_len=LENGTH), "dump_folder": ""}
    with torch.device("meta"):
        model: Any = config.build()
    for p in model.parameters():
        if not p.requires_grad:
            p.data = p.data.to(torch.bfloat16)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    parallelize_llama(model, parallel_dims=dims, compile_config=CompileConfig(enable=False), ac_config=None, **how)
    positions = torch.arange(LENGTH - 1).expand(2, -1)

    def loss_of(sample: int) -> torch.Tensor:
        ids = tokens(sample)
        logits = model(ids[:, :-1], positions=positions, attention_masks=model.get_attention_masks(positions))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) / scenario.accumulate

    def evaluate() -> float:
        with evaluating(model):
            return loss_of(-1).item()

    training = Training(scenario, evaluate)
    for call in range(scenario.calls):
        connect(model)
        if call == 0:
            model.to_empty(device="cpu")
            torch.manual_seed(0)
            torch.no_grad()(model.init_weights)()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        training.begin(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            scenario.before_step(training, step)
            for number in range(scenario.accumulate):
                training.micro_batch()
                loss = loss_of(training.num_micro_batches)
                loss.backward()
                training.losses.append(loss.item())
                last = number == scenario.accumulate - 1
                (scenario.before_optimizer if last else scenario.between_micro_batches)(training, step)
            clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            scenario.after_step(training, step)
    return training


def train_by(trainer_class: Any, config_class: Any, scenario: Scenario, connect: Connect, **how: Any) -> Training:
    """Train with transformers' Trainer or one of TRL's trainers, and run the scenario's actions in its callbacks.

    Args:
        trainer_class: class of the trainer.
        config_class: class of the trainer's arguments.
        scenario: actions around the steps of the training.
        connect: function that prepares the model for plain FSDP2 or for ZeRO++.
        how: further arguments of the trainer, such as model and data.
    """
    from transformers import TrainerCallback

    class Recorded(trainer_class):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            training.micro_batch()
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            training.losses.append(loss.item())
            return loss

    class Calls(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
            training.begin(model)
            connect(model)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            scenario.before_step(training, state.global_step)

        def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            scenario.between_micro_batches(training, state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            scenario.before_optimizer(training, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            scenario.after_step(training, state.global_step - 1)

    with tempfile.TemporaryDirectory() as folder:
        arguments = config_class(
            output_dir=folder,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=scenario.accumulate,
            learning_rate=1e-2,
            weight_decay=0.1,
            lr_scheduler_type="constant",
            max_steps=STEPS,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        )
        trainer = Recorded(args=arguments, callbacks=[Calls()], **how)
        training = Training(scenario, lambda: float(trainer.evaluate()["eval_loss"]))
        for _ in range(scenario.calls):
            trainer.train()
    return training


def trainer(scenario: Scenario, connect: Connect) -> Training:
    """Train a small Llama with transformers' Trainer on random tokens, and return its losses and model."""
    from transformers import Trainer, TrainingArguments

    samples = torch.randint(128, (40, LENGTH), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids} for ids in samples]
    model = with_peft(llama()) if scenario.lora else llama()
    how = {"model": model, "train_dataset": data, "eval_dataset": data[:4]}
    return train_by(Trainer, TrainingArguments, scenario, connect, **how)


def trl_sft(scenario: Scenario, connect: Connect) -> Training:
    """Train a small Llama with TRL's SFTTrainer on texts about sums, and return its losses and model."""
    from trl import SFTConfig, SFTTrainer

    data = texts(prompt="{} plus 1 is", completion=" {1}")
    return train_by(SFTTrainer, SFTConfig, scenario, connect, model=llama(), **trl_arguments(scenario, data))


def trl_dpo(scenario: Scenario, connect: Connect) -> Training:
    """Train with TRL's DPOTrainer.

    The reference model is a copy of the model, or with LoRA the model without its adapters.
    """
    from trl import DPOConfig, DPOTrainer

    data, model = texts(prompt="{} plus 1 is", chosen=" {1}", rejected=" {1}0"), llama()
    how = trl_arguments(scenario, data) | ({} if scenario.lora else {"ref_model": copy.deepcopy(model)})
    return train_by(DPOTrainer, DPOConfig, scenario, connect, model=model, **how)


def trl_arguments(scenario: Scenario, data: Any) -> dict[str, Any]:
    lora = {"peft_config": lora_config()} if scenario.lora else {}
    return {"train_dataset": data, "eval_dataset": data.select(range(4)), "processing_class": tokenizer(), **lora}


# for each framework: the function that trains in it, and the packages that this function needs
FRAMEWORKS: dict[str, tuple[Callable[[Scenario, Connect], Training], tuple[str, ...]]] = {
    "accelerate": (accelerate_loop, ("accelerate", "peft")),
    "torchtitan": (torchtitan_loop, ("torchtitan",)),
    "Trainer": (trainer, ("accelerate", "peft")),
    "TRL SFT": (trl_sft, ("trl", "peft")),
    "TRL DPO": (trl_dpo, ("trl", "peft")),
}

# ---- checkpoints that the frameworks save and load ------------------------------------------------------------------

DELTAS = megazpp.ZeroConfig(zeropp=True, zero_weight_delta="lossless", zero_error_feedback=False)


def accelerate_checkpoints(folder: str, kind: str) -> None:
    """Check that accelerate resumes bit-identically from its own checkpoints, with plain FSDP2 and with ZeRO++.

    Each of the two also resumes from the other one's checkpoints, with nearly equal losses. `kind` is accelerate's
    `state_dict_type`.
    """
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    def run(zeropp: bool, *, load: str = "", save: str = "") -> list[float]:
        """Return the losses of the steps 3 to 5 of a training with six steps.

        `save` is the folder for a checkpoint before step 3. `load` is a folder from which the run resumes at step 3.
        """
        forget_accelerate()
        wrap = {"auto_wrap_policy": "transformer_based_wrap", "state_dict_type": kind}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **wrap)
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16", cpu=True)
        model: Any = llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        if zeropp:
            handle = megazpp.zeropp(model, ranks_per_node=1, config=DELTAS)
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: handle.save(folder))
            accelerator.register_load_state_pre_hook(lambda models, folder: handle.load(folder))
        else:
            plainly(model)
        if load:
            accelerator.load_state(load)
        losses = []
        for step in range(3 if load else 0, 6):
            if step == 3 and save:
                accelerator.save_state(save)
            loss = model(input_ids=tokens(step), labels=tokens(step)).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses[-3:]

    plain, ours = run(False, save=f"{folder}/plain"), run(True, save=f"{folder}/ours")
    assert run(True, load=f"{folder}/ours") == ours
    assert run(False, load=f"{folder}/plain") == plain
    near = {"rtol": 2e-3, "atol": 0.0}
    torch.testing.assert_close(run(True, load=f"{folder}/plain"), plain, **near)
    torch.testing.assert_close(run(False, load=f"{folder}/ours"), ours, **near)


def trainer_checkpoints(folder: str, kind: str) -> None:
    """Check that transformers' Trainer resumes bit-identically from its checkpoints, with plain FSDP2 and with ZeRO++.

    Each of the two also resumes from the other one's checkpoints, with nearly equal weights. `kind` is FSDP's
    `state_dict_type`.
    """
    from transformers import Trainer, TrainingArguments

    samples = torch.randint(128, (40, LENGTH), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids} for ids in samples]

    def run(zeropp: bool, name: str, *, resume: str | None = None) -> dict[str, torch.Tensor]:
        """Train six steps, and return the unsharded weights by name.

        `resume` is the checkpoint from which the last three steps start; None trains from the beginning.
        """
        forget_accelerate()
        arguments = TrainingArguments(
            output_dir=f"{folder}/{name}",
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            max_steps=6,
            save_steps=3,
            report_to="none",
            use_cpu=True,
            bf16=True,
            disable_tqdm=True,
            fsdp=True,
            fsdp_config={
                "version": 2,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": kind,
            },
        )
        callbacks = [megazpp.trainer_callback(ranks_per_node=1, config=DELTAS)] if zeropp else []
        trainer = Trainer(model=llama(), args=arguments, train_dataset=data, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=resume)
        return {name: weight.full_tensor() for name, weight in trainer.model.state_dict().items()}

    exact, near = {"rtol": 0.0, "atol": 0.0}, {"rtol": 1e-2, "atol": 4e-3}
    ours, plain = run(True, "ours"), run(False, "plain")
    torch.testing.assert_close(run(True, "ours", resume=f"{folder}/ours/checkpoint-3"), ours, **exact)
    torch.testing.assert_close(run(False, "plain", resume=f"{folder}/plain/checkpoint-3"), plain, **exact)
    torch.testing.assert_close(run(True, "mixed", resume=f"{folder}/plain/checkpoint-3"), plain, **near)
    torch.testing.assert_close(run(False, "other", resume=f"{folder}/ours/checkpoint-3"), ours, **near)


def forget_accelerate() -> None:
    """Make accelerate use FSDP2 on CPUs as it does on GPUs, and reset its global states of earlier trainings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from helpers.on_cpu import accelerate_as_on_gpus

    accelerate_as_on_gpus()
    # accelerate requires these variables, although the process groups already exist
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


CHECKPOINTS: dict[str, Callable[[str, str], None]] = {
    "accelerate": accelerate_checkpoints,
    "Trainer": trainer_checkpoints,
}

# ---- the comparison of ZeRO++ with plain FSDP2 ----------------------------------------------------------------------


def plainly(model: nn.Module) -> None:
    """Leave the model on plain FSDP2, but make its reductions sum without dividing, because gloo cannot divide."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def train(framework: str, scenario: str, connect: Connect) -> Training:
    function, needed = FRAMEWORKS[framework]
    if "accelerate" in needed or "trl" in needed:
        forget_accelerate()
    if "torchtitan" in needed:
        from helpers.on_cpu import torchtitan_on_cpu

        torchtitan_on_cpu()
    torch.manual_seed(0)
    return function(SCENARIOS[scenario](), connect)


def compare(framework: str, scenario: str) -> tuple[list[float], int]:
    """Train on two nodes of one rank, once with plain FSDP2 and once with unquantized ZeRO++, and compare the results.

    Losses and weights must be bit-identical, because a sum over two ranks has only one order.

    Args:
        framework: key of FRAMEWORKS.
        scenario: key of SCENARIOS.

    Returns:
        (losses with ZeRO++, bytes that this rank has sent across nodes).
    """
    handles: list[Any] = []

    def connect(model: nn.Module) -> None:
        handles.append(megazpp.zeropp(model, ranks_per_node=1, config=EXACT))

    plain = train(framework, scenario, plainly)
    ours = train(framework, scenario, connect)
    assert ours.losses == plain.losses
    torch.testing.assert_close(ours.weights(), plain.weights(), rtol=0.0, atol=0.0)
    assert all(weight.isfinite().all() for weight in plain.weights().values())
    return ours.losses, handles[0].counter.sent_bytes("cross")


def is_installed(framework: str) -> bool:
    """Return True if the framework's packages are installed and work with this torch.

    torchtitan 0.3 imports `DataParallelMeshDims` from FSDP2, which torch 2.11 does not have.
    """
    if framework == "torchtitan" and not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        return False
    return all(importlib.util.find_spec(name) for name in FRAMEWORKS[framework][1])
