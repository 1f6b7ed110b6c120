"""Test tools/post_train.py.

Every objective runs and resumes bit for bit, and bad input is rejected before the start.
"""

import contextlib
import inspect
import io
import json
import math
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import convert_checkpoint
import pytest
import torch
from helpers.chat_templates import EACH
from helpers.hf_models import TOKENS, logits, make_llama, save
from helpers.hf_tokenizers import qwen2
from helpers.program import ROOT, run_forked
from helpers.refusals import not_refused, table
from helpers.tiers import nightly
from helpers.tool import run_tool
from post_train import main
from transformers import AutoModelForCausalLM, AutoTokenizer

from megazpp.checkpoint.folder import CheckpointFolder
from megazpp.checkpoint.read import LoadSource, find_weights
from megazpp.convert.huggingface import open_model
from megazpp.convert.native import open_checkpoint
from megazpp.features import FEATURES
from megazpp.inference.config import SampleConfig
from megazpp.post_training import setup
from megazpp.post_training.config import DEFAULTS, EXTRA, post_configs
from megazpp.post_training.setup import find_start
from megazpp.run.arguments import ParsedRun, parse_run_config

pytestmark = pytest.mark.slow

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0.1 --train-iters 2 --lr 1e-3 --micro-batch-size 4 "
    "--mock-data --eval-iters 0 --nproc 1 --make-vocab-size-divisible-by 1 --save base"
)
COMMON = "--max-length 24 --lr 1e-3 --lr-decay-style constant --log-interval 1 --data-cache-path cache"
LAYOUT = "--nproc 2 --micro-batch-size 2 --global-batch-size 8 --eval-iters 0"
SFT = f"--objective sft --train-data-path chats.jsonl {LAYOUT}"
DPO = f"--objective dpo --train-data-path pairs.jsonl {LAYOUT}"
ONE_RANK = "--nproc 1 --micro-batch-size 4"  # cheaper, for runs that do not test layouts
DRAWN = f"--max-completion-length 8 --reward-funcs rewards.py:vowels --train-data-path prompts.jsonl {LAYOUT}"
REWARDS = """
def vowels(prompts, completions, word, **columns):
    scores = [sum(c in "aeiou" for c in text) - 0.1 * len(text) + len(w) for text, w in zip(completions, word)]
    return [None if sum(map(ord, text)) % 5 == 0 else score for text, score in zip(completions, scores)]
"""
DELAYED_UPDATES = """
import time
from megazpp.host_states.memory import HostMemory

submit = HostMemory.submit
HostMemory.submit = lambda self, task: submit(self, lambda rows: (time.sleep(0.1), task(rows)))
"""
TIMED = {"step_seconds", "tokens_per_second", "peak_memory_bytes", "rollout/seconds", "rollout/tokens_per_second"}
LN_2 = pytest.approx(math.log(2), abs=1e-5)  # DPO's loss of a pair while the policy still equals the reference


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """Make a folder with a pretrained model in `base`, data files of every kind, and reward functions.

    Return its path.
    """
    folder = tmp_path_factory.mktemp("post")
    tool(folder, "../pretrain_gpt", MODEL)
    words = [f"word{i}" for i in range(40)]
    write(folder / "chats.jsonl", [{"prompt": f"Say {w}: ", "completion": w} for w in words])
    write(folder / "pairs.jsonl", [{"prompt": f"Say {w}: ", "chosen": w, "rejected": "no"} for w in words])
    write(folder / "prompts.jsonl", [{"prompt": f"Say {w}: ", "word": w} for w in words])
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def tool(home: Path, name: str, flags: str, *, status: int = 0) -> str:
    """Run tools/`name`.py in the folder `home`, check its exit status, and return its output.

    Programs that train start as forks. The others run in this process or on the shared worker ranks, which is cheaper.
    """
    words = flags.split()
    if name == "convert_checkpoint":
        said = io.StringIO()
        with contextlib.chdir(home), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code, output = convert_checkpoint.main(words), said.getvalue()
    elif name in ("generate", "evaluate"):
        code, output = run_tool(name, *words, world=1 + ("--tensor-model-parallel-size 2" in flags), cwd=home)
    else:
        code, output = run_forked(str(ROOT / f"tools/{name}.py"), *words, folder=home, cwd=home)
    assert code == status, output
    return output


def post_train(home: Path, name: str, flags: str, *, load: str = "base") -> str:
    """Run post_train.py; it saves checkpoints in the folder `name` and records in runs/`name`. Return its output."""
    return tool(home, "post_train", f"{flags} {COMMON} --load {load} --save {name} --run-dir runs/{name}")


def rows(home: Path, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records of a run's `file`, without times and memory, which differ between machines."""
    lines = (home / "runs" / name / file).read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMED} for line in lines]


def trained(home: Path, name: str, flags: str, **where: str) -> list[dict[str, Any]]:
    post_train(home, name, flags, **where)
    return rows(home, name)


def stopped(home: Path, name: str, iteration: int) -> str:
    """Copy one checkpoint of a run to the folder `name`-on, as if the run had been interrupted there.

    Return the folder's name.
    """
    checkpoint = f"iter_{iteration:07}"
    shutil.copytree(home / name / checkpoint, home / f"{name}-on" / checkpoint)
    (home / f"{name}-on" / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return f"{name}-on"


def test_supervised_training_learns_and_is_validated(home):
    evaluated = "--valid-data-path chats.jsonl --eval-iters 2 --eval-interval 15 --eval-on-start"
    found = trained(home, "sft", f"{SFT} {ONE_RANK} --packing --train-iters 30 {evaluated}")
    assert found[-1]["lm_loss"] < found[0]["lm_loss"] - 0.3
    assert [row["iteration"] for row in rows(home, "sft", "validation.jsonl")] == [0, 15, 30]
    # --max-length 24 does not change seq_length in the checkpoint, from which generate.py and exports take the context
    assert open_checkpoint(home / "sft", None)[1].flags["seq_length"] == 32


CHAT = EACH % (
    "{{ tone }}<|im_start|>{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}\n"
)


def test_chat_template_is_saved_exported_and_compared_on_resume(home):
    tokenizer, own = home / "qwen", home / "own.jinja"
    tokenizer.mkdir()
    qwen2(tokenizer)
    (tokenizer / "generation_config.json").write_text(json.dumps({"eos_token_id": [1]}))
    named = MODEL.replace("--tokenizer-type NullTokenizer", "--tokenizer-model qwen")
    tool(home, "../pretrain_gpt", f"{named} --save spoken")
    own.write_text(CHAT)
    talks = [[{"role": "user", "content": f"a{n}"}, {"role": "assistant", "content": f"{n}"}] for n in range(9)]
    write(home / "talks.jsonl", [{"messages": talk} for talk in talks])
    sft = f"--objective sft --train-data-path talks.jsonl {LAYOUT} {ONE_RANK} --assistant-only-loss"

    def train(iterations: int, flags: str, load: str = "talking") -> str:
        anew = "" if iterations == 2 else "--override-opt_param-scheduler"
        return post_train(home, "talking", f"{sft} --train-iters {iterations} {flags} {anew}", load=load)

    ways = '--chat-template own.jinja --chat-template-kwargs {"tone":"kind"}'
    train(2, f"{ways} --eos-token <|endoftext|>", load="spoken")
    (kept,) = (home / "talking").glob("tokenizer-*/chat_template.jinja")
    assert kept.read_text() == CHAT
    ways = ways.removeprefix("--chat-template own.jinja ")
    # without the flag, the template comes from the checkpoint, so the tokens are the same
    assert "not the same" not in train(3, ways)
    # the template file has the same name and other content, which the run must notice
    own.write_text(CHAT.replace("im_start", "im_end"))
    said = train(4, f"{ways} --chat-template own.jinja --system-prompt s")
    assert all(
        part in said for part in ("--system-prompt is s, was None", "the tokens of the examples are not the same")
    )
    own.write_text(CHAT)
    train(5, f"{ways} --chat-template own.jinja")
    tool(home, "convert_checkpoint", "--input talking --output exported")
    theirs = AutoTokenizer.from_pretrained(home / "exported")
    said = {
        name: json.loads((home / "exported" / f"{name}.json").read_text()) for name in ("config", "generation_config")
    }
    assert (theirs.chat_template, theirs.eos_token, theirs.eos_token_id) == (CHAT, "<|endoftext|>", 0)
    assert (said["config"]["eos_token_id"], said["generation_config"]["eos_token_id"]) == (0, [0, 1])
    plain = (
        f"--objective sft --train-data-path chats.jsonl {LAYOUT} {ONE_RANK} --train-iters 1 --chat-template own.jinja"
    )
    # data without conversations needs no template, so the checkpoint of a run on such data has none
    post_train(home, "plain", plain, load="spoken")
    assert list((home / "plain").glob("tokenizer-*/chat_template.jinja")) == []


def test_reward_model_scores_ppo_from_memory_disk_and_import(home):
    found = trained(home, "reward", f"--objective reward --data-path pairs.jsonl --train-iters 20 {LAYOUT} {ONE_RANK}")
    assert found[-1]["accuracy"] > 0.9
    flags = f"--objective ppo {DRAWN} --train-iters 3 --num-ppo-epochs 2 --zeropp --emulate-nodes 2 --reward-load"
    found = trained(home, "ppo", f"{flags} reward")
    known = {"kl", "objective/kl", "rewards/vowels/mean", "rewards/reward_model/mean", "loss/value_avg"}
    assert known <= found[0].keys()
    assert found[0]["clip_ratio"] == 0.0
    assert found[0]["sampling_logp_difference/max"] < 1e-4
    disk = "--weight-bits 8 --weights-device disk --weight-store stores"
    streamed = trained(home, "ppo-disk", f"{flags} reward {disk}")
    kls = [[row["kl"] for row in run] for run in (found, streamed)]
    assert kls[0] != kls[1]  # weights in 8 bits change results, but on some CPUs not yet in the first rollouts
    assert streamed[0]["kl"] == pytest.approx(found[0]["kl"], abs=0.1)
    assert {path.name for path in (home / "stores").iterdir()} == {"reference", "reward"}
    assert "value head (scalar_head) is left out" in tool(home, "convert_checkpoint", "--input ppo --output ppo-hf")
    assert logits(home / "ppo-hf").isfinite().all()
    tool(home, "convert_checkpoint", "--input reward --output reward-hf")
    tool(home, "convert_checkpoint", "--input reward-hf --output reward-in --tokenizer-type NullTokenizer")
    assert trained(home, "ppo-in", f"{flags} reward-in --exit-interval 1") == found[:1]


@pytest.fixture(scope="module")
def adapted(home) -> dict[str, dict[str, Any]]:
    """Train adapters of a small Llama, and return the first DPO record for several ways to load them.

    At the end, the Llama's folder is moved, so that later tests must name its new place (--lora-base).
    """
    peft = pytest.importorskip("peft")
    save(make_llama(vocab_size=257, max_position_embeddings=48), home / "hf")
    foreign = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(home / "hf"), foreign).save_pretrained(home / "foreign")
    tool(home, "convert_checkpoint", "--input hf --output llama --tokenizer-type NullTokenizer --vocab-size 256")
    tool(home, "convert_checkpoint", "--input llama --output foreign-in --adapter foreign --to megazpp")
    split = "--tensor-model-parallel-size 2 --lr 1e-2"
    post_train(
        home, "adapters", f"{SFT} {split} --train-iters 4 --lora-r 3 --lora-target-modules all-linear", load="llama"
    )
    unsplit = f"{ONE_RANK} --tensor-model-parallel-size 1"
    ways = {
        "merged": ("adapters", "--lora-r 2"),
        "kept": ("llama", f"--lora-load adapters/adapter {unsplit}"),
        "all": ("adapters", unsplit),
        # each rank imports PEFT to read a foreign adapter
        "foreign-kept": ("llama", f"--lora-load foreign {unsplit}"),
        "foreign-all": ("foreign-in", unsplit),
    }
    run = f"{DPO} {split} --train-iters 1"
    first = {name: trained(home, name, f"{run} {flags}", load=load)[0] for name, (load, flags) in ways.items()}
    (home / "llama").rename(home / "moved")
    return first


def test_dpo_starts_from_our_and_pefts_adapters_as_reference(adapted):
    assert [row["lm_loss"] for row in adapted.values()] == [LN_2] * 5
    logps = {name: pytest.approx(row["logps/chosen"], abs=1e-4) for name, row in adapted.items()}
    assert adapted["kept"]["logps/chosen"] == logps["merged"] == adapted["all"]["logps/chosen"]
    assert adapted["foreign-kept"]["logps/chosen"] == logps["foreign-all"]


def test_moved_or_different_base_is_rejected(home, adapted):
    for name, flags in (("generate", "--load merged --prompt a"), ("convert_checkpoint", "--input kept --output no")):
        assert "base is not in" in tool(home, name, flags, status=2)
    wrong = tool(home, "generate", "--load kept --prompt a --lora-base all", status=2)
    assert "its adapters has weights with checksum" in wrong


def test_stacked_adapters_give_texts_and_perplexity_of_the_merged_model(home, adapted):
    tool(home, "convert_checkpoint", "--input merged --output merged-ours --to megazpp --lora-base moved")
    write(home / "text.jsonl", [{"text": "Say word3: word3"}])
    texts, perplexities = [], []
    for load in ("--load merged --lora-base moved --tensor-model-parallel-size 2", "--load merged-ours"):
        said = tool(home, "generate", f"{load} --prompt Say --temperature 0 --sample-tokens 8")
        texts += re.findall("^Say.*", said, re.MULTILINE)
        perplexities += re.findall(r"PPL: (\S+)", tool(home, "evaluate", f"{load} --input text.jsonl"))
    assert texts == texts[:1] * 2
    first, second = map(float, perplexities)
    # one of the two evaluations has two ranks, which add fp32 numbers in another order
    assert first == pytest.approx(second, rel=2e-6)


def test_exported_adapters_match_peft(home, adapted):
    """Compare logits of exported adapters in peft with this project's.

    Logits of about 1 differ by up to 1e-5 in fp32.
    """
    from peft import AutoPeftModelForCausalLM, PeftModel

    def computed(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(TOKENS).logits

    for name in ("adapters", "merged", "kept"):
        tool(home, "convert_checkpoint", f"--input {name} --output {name}-hf --lora-base moved")
    tool(home, "convert_checkpoint", "--input kept --output kept-two --keep-adapters --lora-base moved")
    theirs = {
        name: AutoPeftModelForCausalLM.from_pretrained(home / name / "adapter", dtype=torch.float32)
        for name in ("adapters", "kept", "kept-two")
    }
    expected = {name: computed(model) for name, model in theirs.items()}
    on_top = PeftModel.from_pretrained(theirs["adapters"].merge_and_unload(), home / "merged/adapter")
    expected["merged"] = computed(on_top)
    torch.testing.assert_close(expected.pop("kept-two"), expected["kept"], rtol=0, atol=1e-5)
    for name, wanted in expected.items():
        found = logits(home / f"{name}-hf")
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert (found - logits(home / "hf")).abs().max() > 0.01


def test_lora_run_resumes_with_its_own_adapters_only(home):
    flags = f"{SFT} --save-interval 2 --train-iters 4"
    straight = trained(home, "lora", f"{flags} --lora-r 3 --lora-alpha 5 --base-weight-bits 4")
    name = stopped(home, "lora", 2)
    others = """
        --lora-r 4 | --lora-r is 4, but --load lora-on has 3
        --lora-alpha 2 --lora-r 3 | is 2.0
        --lora-r 3 --base-weight-bits 8 | --base-weight-bits is 8, but --load lora-on has 4
    """
    assert not_refused(table(others), lambda given: asked(home, f"--load {name} --save {name} {flags} {given}")) == []
    assert trained(home, name, flags, load=name) == straight[2:]
    other = f"{flags} {COMMON} --load base --lora-r 3 --ref-checksum {'0' * 16}"
    assert f"--ref-checksum says {'0' * 16}" in tool(home, "post_train", other, status=2)


@pytest.fixture(scope="module")
def dpo(home) -> list[dict[str, Any]]:
    """Train ten steps of DPO, and return the records of the steps."""
    return trained(home, "dpo", f"{DPO} {ONE_RANK} --train-iters 10")


def test_dpo_learns_and_a_precomputed_reference_changes_nothing(home, dpo):
    assert dpo[0]["lm_loss"] == LN_2
    assert dpo[-1]["rewards/accuracies"] > 0.9
    flags = f"{DPO} {ONE_RANK} --precompute-ref-log-probs --train-iters"
    before = trained(home, "dpo-2", f"{flags} 4")
    assert [row["lm_loss"] for row in before] == pytest.approx([row["lm_loss"] for row in dpo[:4]], abs=1e-5)
    output = post_train(home, "dpo-3", f"{flags} 10 --valid-data-path pairs.jsonl --eval-iters 1 --eval-interval 10")
    assert rows(home, "dpo-3")[:4] == before
    (validation,) = rows(home, "dpo-3", "validation.jsonl")
    assert validation["lm_loss"] < 0.6
    # the line ends without a perplexity, because a loss of pairs has none
    assert re.search(r"validation loss at iteration 10 \| lm loss value: \S+ \| \n", output)


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        nightly("twice", "--num-iterations 2"),
        nightly("lora", "--lora-r 4 --base-weight-bits 4"),
        ("zeropp", "--zeropp --emulate-nodes 2"),
    ],
)
def test_grpo_run_resumed_inside_a_buffer_is_bit_identical(home, name, extra):
    flags = f"--objective grpo {DRAWN} --num-generations 4 --beta 0.1 --steps-per-generation 2 {extra} --train-iters 5"
    straight = trained(home, f"grpo-{name}", f"{flags} --save-interval 3")
    going_on = stopped(home, f"grpo-{name}", 3)
    again = trained(home, going_on, flags, load=going_on)
    assert [row["iteration"] for row in again] == [4, 5]
    assert again == straight[3:]
    shown = rows(home, f"grpo-{name}", "completions.jsonl")
    assert shown[0].keys() == {"iteration", "prompt", "completion", "rewards"}
    first = [row for row in shown if row["iteration"] == 1]
    # completions.jsonl shows complete groups: the 4 completions of one prompt, then the 4 of the next.
    assert [row["prompt"] for row in first] == [first[0]["prompt"]] * 4 + [first[4]["prompt"]] * 4
    assert len({row["completion"] for row in first}) > 2
    assert {row["rewards"]["vowels"] is None for row in shown} == {True, False}


@pytest.mark.parametrize(
    ("layout", "offload"),
    [
        ("--zeropp --emulate-nodes 2", "--optimizer-cpu-offload --zero-offload-partial-sums"),
        nightly("--tensor-model-parallel-size 1", "--optimizer-cpu-offload"),
    ],
    ids=["zeropp", "ZeRO-3"],
)
def test_grpo_with_states_in_host_memory_is_bit_identical(home, request, layout, offload):
    """Train GRPO with optimizer states in host memory, and compare with states on the device.

    Generation must wait for the updated weights: this test delays the host's updates until after generation starts.
    """
    (home / "delayed.py").write_text(REWARDS + DELAYED_UPDATES)
    drawn = f"--objective grpo {DRAWN} --num-generations 4 --num-iterations 2 --train-iters 5"
    device, host = (f"grpo-{request.node.callspec.id}-{where}" for where in ("device", "host"))
    plain = trained(home, device, f"{drawn} {layout}")
    assert len({row["grad_norm"] for row in plain}) == 5
    assert len({row["iteration"] for row in rows(home, device, "completions.jsonl")}) > 2
    delayed = drawn.replace("rewards.py:", "delayed.py:")
    assert trained(home, host, f"{delayed} {layout} {offload}") == plain
    assert rows(home, host, "completions.jsonl") == rows(home, device, "completions.jsonl")
    logged = re.findall(r"states in host memory: (\S+) GB per rank", (home / "runs" / host / "log.txt").read_text())
    assert [float(gigabytes) > 0 for gigabytes in logged] == [True]


@pytest.fixture(scope="module")
def experts(home) -> str:
    """Pretrain a model with experts on two expert-parallel ranks. Return the name of its checkpoint folder."""
    style = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope"
    mixture = "--num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2"
    changed = MODEL.replace("--nproc 1", "--nproc 2").replace("--save base", "--save experts")
    tool(home, "../pretrain_gpt", f"{changed} {style} {mixture} --untie-embeddings-and-output-weights")
    return "experts"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        nightly("sft", f"{SFT} --packing --expert-model-parallel-size 2"),
        nightly("reward", f"{DPO.replace('dpo', 'reward')} --expert-model-parallel-size 2"),
        ("dpo", f"{DPO} --expert-model-parallel-size 2"),
        ("lora", f"{DPO} --lora-r 3 --base-weight-bits 4"),
        nightly("grpo", f"--objective grpo {DRAWN} --num-generations 4 --beta 0.1 --steps-per-generation 2"),
        nightly("ppo", f"--objective ppo {DRAWN} --tensor-model-parallel-size 2"),
    ],
)
def test_training_of_experts_resumes_bit_for_bit(home, experts, name, flags):
    flags = (
        f"{flags} --zeropp --emulate-nodes 2 --train-iters 4"
        if name in ("lora", "grpo")
        else f"{flags} --train-iters 4"
    )
    straight = trained(home, f"experts-{name}", f"{flags} --save-interval 3", load=experts)
    assert all(row["max_expert_load"] >= 1.0 for row in straight)
    going_on = stopped(home, f"experts-{name}", 3)
    assert trained(home, going_on, flags, load=going_on) == straight[3:]
    if name in ("dpo", "lora"):
        assert straight[0]["lm_loss"] == LN_2


def biases(folder: Path) -> list[torch.Tensor]:
    model = open_checkpoint(folder, None)[0]
    return [entry.read() for name, entry in model.tensors.items() if name.endswith(".expert_bias")]


def test_biases_of_experts_are_constant_and_lora_runs_can_be_used(home):
    """Fine-tune a model with biases of experts, as in GLM.

    SFT keeps the biases unless --moe-router-bias-update-rate is given. A LoRA run on such a model can generate text,
    and can be converted.
    """
    style = "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --num-experts 4"
    router = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.1"
    shared = "--moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16 --untie-embeddings-and-output-weights"
    pretrained = MODEL.replace("--save base", "--save biased").replace("--train-iters 2", "--train-iters 3")
    tool(home, "../pretrain_gpt", f"{pretrained} {style} {router} {shared}")
    before = biases(home / "biased")
    assert all(bias.any() for bias in before)
    for name, flags, moves in (("biases-kept", "", False), ("biases-moved", "--moe-router-bias-update-rate 0.1", True)):
        post_train(home, name, f"{SFT} {ONE_RANK} --train-iters 2 {flags}", load="biased")
        assert all(torch.equal(*pair) != moves for pair in zip(biases(home / name), before, strict=True)), name
    # Generate and convert from a LoRA run whose base has routers with expert biases.
    post_train(home, "biased-lora", f"{SFT} {ONE_RANK} --train-iters 2 --lora-r 2", load="biased")
    tool(home, "generate", "--load biased-lora --prompt Say --sample-tokens 2")
    for name, flags in (("merged", "--to megazpp"), ("exported", ""), ("parts", "--keep-adapters")):
        tool(home, "convert_checkpoint", f"--input biased-lora --output biased-{name} {flags}")
    opened = [open_checkpoint(home / "biased-merged", None)[0], open_model(home / "biased-exported")]
    for model in (*opened, open_model(home / "biased-parts")):
        found = [entry.read() for name, entry in model.tensors.items() if name.endswith(".expert_bias")]
        assert all(torch.equal(*pair) for pair in zip(found, before, strict=True))


def test_texts_of_experts_do_not_depend_on_layout_and_place_of_the_weights(home, experts):
    said = {
        tool(home, "generate", f"--load {experts} --prompt Say --temperature 0 --sample-tokens 8 {flags}")
        .partition("Say")[2]
        .partition("\n")[0]
        for flags in ("", "--tensor-model-parallel-size 2", "--weights-device host", "--weights-device disk")
    }
    assert len(said) == 1


def test_flags_are_accepted_if_the_checkpoint_has_what_they_need(home, experts):
    """Pass flags that need another flag, which is in the checkpoint and not on the command line: --num-experts."""
    fixed = "--micro-batch-size 8 --train-iters 1 --nproc 2 --print-config"
    for flags in ("--objective sft --moe-aux-loss-coeff 0.01", "--objective dpo --moe-z-loss-coeff 0.001"):
        assert asked(home, f"{fixed} --load {experts} {flags}") == 0
    for flags, needs in (
        ("--moe-aux-loss-coeff 0.01", "needs --num-experts"),
        ("--label-smoothing 0.1", "needs --objective dpo"),
        ("--lora-alpha 4.0", "needs --lora-r"),
    ):
        with pytest.raises(ValueError, match=f"^command line: {flags} {needs}"):
            asked(home, f"{fixed} --load base --objective sft {flags}")


def test_flags_that_experts_do_not_support_are_rejected(home, experts):
    rows = """
        --objective grpo --expert-model-parallel-size 2 | --expert-model-parallel-size 2 with --objective grpo: data
        --objective ppo --expert-model-parallel-size 2 | --expert-model-parallel-size 2 with --objective ppo: data
        --objective sft --lora-r 2 --expert-model-parallel-size 2 | --expert-model-parallel-size 2 with --lora-r 2
        --objective sft --moe-router-bias-update-rate 0.1 | --moe-router-bias-update-rate 0.1 needs --moe-router-enable
        --objective sft --lora-r 2 --lora-target-modules all-linear | all-linear with --num-experts 4: only attention
    """
    fixed = f"--load {experts} --data-path prompts.jsonl --micro-batch-size 8 --train-iters 1 --nproc 2"
    assert not_refused(table(rows), lambda flags: asked(home, f"{fixed} {flags}")) == []


def asked(home: Path, flags: str) -> object:
    """Check a command line in the folder `home` as the program does before it starts workers. Return the exit code."""
    with contextlib.chdir(home):
        # the unwrapped `main` raises errors, while the decorated one prints them and exits
        return inspect.unwrap(main)(shlex.split(flags))


# Each line has rejected flags and the beginning of the error. The test adds `--load base` and prompt data, unless the
# line has its own.
REFUSED = """
    --objective sft --load nowhere | --load nowhere has no checkpoint
    --objective sft --seq-length 8 | --seq-length 8: post-training uses --max-length
    --objective sft --split 90,10,0 | --split is for pretraining: in post-training each sample is a document
    --objective dpo --reset-attention-mask | --reset-attention-mask is for pretraining
    --objective grpo --eod-mask-loss | --eod-mask-loss is for pretraining
    --objective grpo | --objective grpo needs --reward-funcs or --reward-load
    --objective grpo --reward-funcs a:b --max-completion-length 8 --num-generations 3 | divisible
    --objective grpo --reward-funcs rewards.py:vowels --max-length 8 | leaves no room for a prompt
    --objective sft --text-path chats.jsonl | --text-path and --mock-data are for pretraining
    --objective sft --hidden-size 64 | --hidden-size is 64, was 32 in base; correct the flags, or leave them out
    --objective ppo --reward-funcs a:b --temperature 0 | --sample-temperature 0.0
    --objective sft --weights-device disk | --weights-device disk is for the weights of a reference or
    --objective grpo --reward-funcs a:b --weight-bits 8 | --weight-bits 8 is for the weights of a
    --objective dpo --lora-r 2 --weights-device host | with --lora-r the reference is the base
    --objective dpo | prompts.jsonl, line 1: there is no 'chosen', only 'prompt', 'word'
    --objective sft --train-data-path a --valid-data-path b | a does not exist
    --objective sft --max-length 64 | --max-length 64 is longer than --max-position-embeddings 32
    --objective sft --save prompts.jsonl/a | --save: cannot write prompts.jsonl/a
    --objective sft --chat-template none.jinja | --chat-template none.jinja cannot be read
    --objective dpo --ref-load . | --ref-load . has no checkpoint
    --objective dpo --ref-ckpt-step 9 | --ref-ckpt-step 9:
    --objective sft --lora-r 2 --ref-checksum zzz | --ref-checksum zzz is not 16 hexadecimal digits
    --objective sft --fp8-format hybrid --bf16 | --fp8-format hybrid needs an NVIDIA GPU
    --objective ppo --max-completion-length 8 --reward-load base | --reward-load base is not a reward
    --objective ppo --max-completion-length 8 --reward-funcs none.py:vowels | No such file
    --objective sft --hidden-dropout 0.1 | --hidden-dropout 0.1: post-training does not use dropout
    --objective dpo --lora-r 2 --lora-dropout 0.1 | --lora-dropout 0.1: --objective dpo does not use dropout
    --objective sft --lora-r 2 --lora-target-modules lm_head | --lora-target-modules lm_head is not a linear
    --objective sft --lora-r 2 --base-weight-bits 4 --tensor-model-parallel-size 2 --nproc 2 | --base-weight-bits 4: -
"""


def test_invalid_flags_are_rejected_before_workers_start(home):
    def ask(flags: str) -> object:
        load = "" if "--load" in flags.split() else "--load base"
        data = "" if "-path" in flags else "--data-path prompts.jsonl"
        return asked(home, f"--micro-batch-size 8 --train-iters 1 --nproc 1 --run-dir never {load} {data} {flags}")

    assert not_refused(table(REFUSED), ask) == []
    with pytest.raises(ValueError, match=r"^--reward-funcs none.py:.*\n--chat-template none.jinja cannot"):
        ask("--objective grpo --max-completion-length 8 --reward-funcs none.py:vowels --chat-template none.jinja")
    assert not (home / "never").exists()
    for flags, missing in (("--load base", "--objective is missing"), ("--objective sft", "--load is missing")):
        refusal = tool(home, "post_train", flags, status=2)
        assert refusal.startswith(f"post_train.py: error: {missing}")
        assert refusal.count("\n") == 1


def test_reference_and_reward_model_with_other_tokens_of_the_same_number_are_rejected(home, monkeypatch):
    other = SimpleNamespace(identity="other", vocab_size=257, decode_with_specials=lambda ids: f"<{ids}>")
    monkeypatch.setattr(setup, "open_tokenizer", lambda *_: other)
    monkeypatch.setattr(setup, "find_frozen", lambda *_, **__: find_weights(CheckpointFolder(home / "base", ""), None))
    fixed = "--micro-batch-size 8 --train-iters 1 --nproc 1 --load base"
    dpo, ppo = (
        "--objective dpo --data-path pairs.jsonl",
        "--objective ppo --data-path prompts.jsonl --max-completion-length 8",
    )
    for flags, given in ((dpo, "--ref-load base"), (ppo, "--reward-load base")):
        with pytest.raises(ValueError, match=f"^{given}: its .*: token 0 is '<.0.>', and '.*' in the policy's"):
            asked(home, f"{fixed} {flags} {given}")


def test_reward_model_is_refused_where_tokens_are_predicted(home):
    post_train(home, "judge", f"--objective reward --data-path pairs.jsonl --train-iters 1 {LAYOUT} {ONE_RANK}")
    sft, dpo = "--objective sft --data-path chats.jsonl --load", "--objective dpo --data-path pairs.jsonl --load"
    for name, flags in (
        ("generate", "--prompt a --load judge"),
        ("evaluate", "--input rewards.py --load judge"),
        ("post_train", f"{sft} judge {COMMON}"),
        ("post_train", f"{dpo} base --ref-load judge {COMMON}"),
    ):
        assert "load judge is a reward model, which scores texts" in tool(home, name, flags, status=2), name


@pytest.fixture(scope="module")
def first(home) -> None:
    """Make the folder `first` with the checkpoint of a supervised run of one step."""
    post_train(home, "first", f"{SFT} {ONE_RANK} --train-iters 1")


def test_run_is_resumed_only_with_its_own_objective(home, first):
    theirs = "first has checkpoints of a run of --objective sft, which"
    for load in ("first", "base"):  # with --load base, the command looks like the one of a job that was queued again
        flags = f"{DPO} --train-iters 1 {COMMON} --load {load} --save first"
        assert f"{theirs} --objective dpo cannot resume" in tool(home, "post_train", flags, status=2)
    pretrained = f"{MODEL} --load first --save first --use-checkpoint-args".replace("--save base", "")
    assert f"{theirs} pretraining cannot resume" in tool(home, "../pretrain_gpt", pretrained, status=2)
    own = f"{SFT} --train-iters 1 {COMMON} --load base --save base"
    assert "a run of pretraining, which --objective sft cannot" in tool(home, "post_train", own, status=2)


def test_evaluation_of_a_post_trained_model_asks_for_input(home, first):
    assert "was trained with --objective sft, whose data" in tool(home, "evaluate", "--load first", status=2)
    assert "lm loss PPL" in tool(home, "evaluate", "--load first --input rewards.py")


def test_plan_counts_all_models(home, capsys):
    plan = "--plan --objective ppo --reward-load base --load base --train-data-path prompts.jsonl --train-iters 1"
    layout = "--nproc 4 --micro-batch-size 1 --max-completion-length 8 --weights-device disk --weight-bits 8"
    for lora in ("", "--lora-r 4 --base-weight-bits 4"):
        assert asked(home, f"{plan} {layout} {lora}") == 0
        output = capsys.readouterr().out
        kinds = {line.split("  ")[0] for line in output.splitlines()}
        assert {"keys and values", "reward model", "total"} <= kinds
        assert ("frozen base" in kinds) == bool(lora) == ("reference model" not in kinds)
        assert ("fastest candidates" in output or "speed is unknown" in output) == (not lora)


def start(home: Path, flags: str, *, restarted: bool = False) -> tuple[ParsedRun, LoadSource]:
    """Parse a command line of post_train.py. Return the parsed run, and the checkpoint from which the run starts."""
    parsed = parse_run_config(
        f"--load {home}/base {flags}".split(),
        home,
        features=FEATURES,
        extra=EXTRA,
        defaults=DEFAULTS,
        default_file=None,
    )
    return find_start(parsed, restarted=restarted)[:2]


def test_restarted_job_resumes_its_own_save_or_starts_from_weights(home, first):
    sources = [start(home, f"--objective sft --save {home}/{x}", restarted=True)[1] for x in ("never-saved", "first")]
    assert [(source.continues, source.optimizer) for source in sources] == [(False, False), (True, True)]


def test_diloco_is_refused_before_nodes_are_counted(home):
    with pytest.raises(ValueError, match="--diloco-steps 9 is for pretraining, not --objective dpo: leave it out"):
        start(home, "--objective dpo --diloco-steps 9")


def test_dropout_of_a_loaded_adapter_is_used_by_sft_only(home):
    import peft

    tool(home, "convert_checkpoint", "--input base --output dropped-hf")
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(home / "dropped-hf"),
        peft.LoraConfig(r=2, lora_dropout=0.25, target_modules=["c_attn"], task_type="CAUSAL_LM"),
    )
    model.save_pretrained(home / "dropped")
    for objective, dropout in (("sft", 0.25), ("dpo", 0.0), ("reward", 0.0), ("grpo", 0.0)):
        parsed, _ = start(home, f"--objective {objective} --lora-load {home}/dropped")
        assert post_configs(parsed).lora.lora_dropout == dropout, objective


def test_defaults_follow_the_objective_and_the_checkpoints_model(home):
    (grpo, _), (ppo, _) = start(home, "--objective grpo"), start(home, "--objective ppo --temperature 0.7 --lr 1e-3")
    config, (post, form, *_) = grpo.config, post_configs(grpo)
    assert (post.beta_or_default, post.loss, post.num_generations, post.needs_reference) == (0.0, "dapo", 8, False)
    sample = config.section(SampleConfig)
    assert (sample.sample_temperature, sample.sample_top_k, sample.sample_top_p) == (1.0, 0, 1.0)
    assert (config.schedule.lr, ppo.config.schedule.lr, ppo.config.section(SampleConfig).sample_temperature) == (
        1e-6,
        1e-3,
        0.7,
    )
    assert (config.model.hidden_size, config.model.hidden_dropout) == (32, 0.0)
    assert config.data.seq_length == form.max_length == 32
    assert (post.ref_load, post.ref_ckpt_step) == (str(home / "base"), 2)
    assert config.checkpoint.finetune
