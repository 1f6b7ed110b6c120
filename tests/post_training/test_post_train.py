"""tools/post_train.py: every objective runs, goes on bit for bit, and refuses what cannot be before anything starts."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.hf_models import TOKENS, make_llama, save
from helpers.program import ROOT, run_forked
from helpers.refusals import not_refused, table
from post_train import prepare

from megazpp.base.arguments import ParsedRun, parse_run_config
from megazpp.checkpoint.read import LoadSource
from megazpp.post_training.config import PostTrainingConfig
from megazpp.post_training.start import EXTRA, find_start, post_configs

pytestmark = pytest.mark.slow

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--tokenizer-type NullTokenizer --hidden-dropout 0.1 --train-iters 2 --lr 1e-3 --micro-batch-size 4 "
    "--mock-data --eval-iters 0 --nproc 1 --make-vocab-size-divisible-by 1"
)
COMMON = "--max-length 24 --lr 1e-3 --lr-decay-style constant --log-interval 1"
DRAWN = "--max-completion-length 8 --reward-funcs rewards.py:vowels --train-data-path prompts.jsonl"
REWARDS = """
def vowels(prompts, completions, word, **columns):
    scores = [sum(c in "aeiou" for c in text) - 0.1 * len(text) + len(w) for text, w in zip(completions, word)]
    return [None if sum(map(ord, text)) % 5 == 0 else score for text, score in zip(completions, scores)]
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """A folder with a pretrained model and data of every kind."""
    folder = tmp_path_factory.mktemp("post")
    code, output = run_forked("pretrain_gpt.py", *MODEL.split(), "--save", f"{folder}/base", folder=folder)
    assert code == 0, output
    words = [f"word{i}" for i in range(40)]
    write(folder / "chats.jsonl", [{"prompt": f"Say {w}: ", "completion": w} for w in words])
    write(folder / "pairs.jsonl", [{"prompt": f"Say {w}: ", "chosen": w, "rejected": "no"} for w in words])
    write(folder / "prompts.jsonl", [{"prompt": f"Say {w}: ", "word": w} for w in words])
    (folder / "rewards.py").write_text(REWARDS)
    write(folder / "same.jsonl", [{"chosen": "a b", "rejected": "a b"}])
    (folder / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (folder / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    (folder / "empty.jsonl").write_text("")
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def post_train(home: Path, name: str, flags: str, *, load: str = "base") -> tuple[int, str]:
    """Run in `home`; the run's records are in runs/NAME."""
    arguments = f"{flags} {COMMON} --load {load} --save {name} --run-dir runs/{name} --data-cache-path cache".split()
    return run_forked(str(ROOT / "tools/post_train.py"), *arguments, folder=home, cwd=home)


def rows(home: Path, name: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    lines = (home / "runs" / name / file).read_text().splitlines()
    return [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) for line in lines]


def trained(home: Path, name: str, flags: str, **where: str) -> list[dict[str, Any]]:
    code, output = post_train(home, name, flags, **where)
    assert code == 0, output
    return rows(home, name)


LAYOUT = "--nproc 2 --micro-batch-size 2 --global-batch-size 8 --eval-iters 0"


def test_supervised_training_learns_and_is_validated(home):
    flags = f"--objective sft --train-data-path chats.jsonl --valid-data-path chats.jsonl --packing {LAYOUT}"
    found = trained(home, "sft", f"{flags} --train-iters 30 --eval-iters 2 --eval-interval 15 --eval-on-start")
    assert found[-1]["lm_loss"] < found[0]["lm_loss"] - 0.3
    assert [row["iteration"] for row in rows(home, "sft", "validation.jsonl")] == [0, 15, 30]


def test_a_reward_model_serves_ppo(home):
    found = trained(home, "reward", f"--objective reward --data-path pairs.jsonl --train-iters 20 {LAYOUT}")
    assert found[-1]["accuracy"] > 0.9
    flags = f"--objective ppo {DRAWN} --train-iters 3 --num-ppo-epochs 2 --zeropp --emulate-nodes 2 {LAYOUT}"
    found = trained(home, "ppo", f"{flags} --reward-load reward")
    known = {"kl", "objective/kl", "rewards/vowels/mean", "rewards/reward_model/mean", "loss/value_avg"}
    assert known <= found[0].keys()
    assert found[0]["clip_ratio"] == 0.0
    assert found[0]["sampling_logp_difference/max"] < 1e-4
    disk = "--weight-bits 8 --weights-on disk --weight-store stores"
    streamed = trained(home, "ppo-disk", f"{flags} --reward-load reward {disk}")
    assert streamed[0]["kl"] != found[0]["kl"]  # 8 bits are not 32
    assert streamed[0]["kl"] == pytest.approx(found[0]["kl"], abs=0.1)
    assert sorted(path.name for path in (home / "stores").iterdir()) == ["reference", "reward"]
    assert "value head (scalar_head) is left out" in tool(home, "convert_checkpoint", "--input ppo --output ppo-hf")
    assert "lm_head" in dir(transformers.AutoModelForCausalLM.from_pretrained(home / "ppo-hf"))
    tool(home, "convert_checkpoint", "--input reward --output reward-hf")
    tool(home, "convert_checkpoint", "--input reward-hf --output reward-in --tokenizer-type NullTokenizer")
    again = trained(home, "ppo-in", f"{flags} --reward-load reward-in")
    assert [untimed(row) for row in again] == [untimed(row) for row in found]


def test_a_lora_run_is_generated_from_trained_further_and_exported(home, tmp_path):
    """fp32 of two programs: 1e-5 of logits of about 1."""
    peft, auto = pytest.importorskip("peft"), transformers.AutoModelForCausalLM
    save(make_llama(vocab_size=257, max_position_embeddings=48), tmp_path / "hf")
    tool(tmp_path, "convert_checkpoint", "--input hf --output base --tokenizer-type NullTokenizer --vocab-size 256")
    for name in ("chats.jsonl", "pairs.jsonl"):
        shutil.copy(home / name, tmp_path)
    layout = "--nproc 2 --tensor-model-parallel-size 2 --micro-batch-size 4 --eval-iters 0 --train-iters 4 --lr 1e-2"
    sft = f"--objective sft --train-data-path chats.jsonl {layout} --lora-r 3 --lora-target-modules all-linear"
    dpo = f"--objective dpo --train-data-path pairs.jsonl {layout}"
    trained(tmp_path, "sft", sft)
    merged = trained(tmp_path, "merged", f"{dpo} --lora-r 2", load="sft")
    going_on = trained(tmp_path, "kept", f"{dpo} --lora-load sft/adapter")
    everything = trained(tmp_path, "all", dpo, load="sft")
    for losses in (merged, going_on, everything):  # the reference is what each began with
        assert losses[0]["lm_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert merged[0]["logps/chosen"] == pytest.approx(going_on[0]["logps/chosen"], abs=1e-4)
    assert merged[0]["logps/chosen"] == pytest.approx(everything[0]["logps/chosen"], abs=1e-4)

    foreign = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(auto.from_pretrained(tmp_path / "hf"), foreign).save_pretrained(tmp_path / "foreign")
    begun = trained(tmp_path, "foreign-on", f"{dpo} --lora-load foreign")[0]
    assert begun["lm_loss"] == pytest.approx(0.693147, abs=1e-5)
    tool(tmp_path, "convert_checkpoint", "--input base --output in --adapter foreign --to megazpp")
    assert begun["logps/chosen"] == pytest.approx(
        trained(tmp_path, "in-on", dpo, load="in")[0]["logps/chosen"], abs=1e-4
    )

    (tmp_path / "base").rename(tmp_path / "moved")
    for name, flags in (("generate", "--load merged --prompt a"), ("convert_checkpoint", "--input kept --output no")):
        assert "base is not in" in tool(tmp_path, name, flags, status=2)
    wrong = tool(tmp_path, "generate", "--load kept --prompt a --lora-base all", status=2)
    assert "its adapters has weights with checksum" in wrong
    for name in ("merged", "kept", "sft"):
        tool(tmp_path, "convert_checkpoint", f"--input {name} --output {name}-hf --lora-base moved")
    tool(tmp_path, "convert_checkpoint", "--input kept --output kept-two --keep-adapters --lora-base moved")
    tool(tmp_path, "convert_checkpoint", "--input merged --output merged-ours --to megazpp --lora-base moved")
    loads = ("--load merged --lora-base moved --tensor-model-parallel-size 2", "--load merged-ours")
    texts = [
        (tool(tmp_path, "generate", f"{load} --prompt Say --temperature 0 --sample-tokens 8"), "Say") for load in loads
    ]
    write(tmp_path / "text.jsonl", [{"text": "Say word3: word3"}])
    texts += [(tool(tmp_path, "evaluate", f"{load} --input text.jsonl"), "PPL") for load in loads]
    shown = [[line for line in text.splitlines() if word in line] for text, word in texts]
    assert shown[0] == shown[1] != []
    perplexities = [float(line.split("PPL: ")[1].split()[0]) for lines in shown[2:] for line in lines]
    assert len(perplexities) == 2
    assert perplexities[0] == pytest.approx(perplexities[1], rel=2e-6)  # two ranks add in another order

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(TOKENS).logits

    first = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "sft/adapter", dtype=torch.float32)
    expected = {"sft": logits(first)}
    expected["merged"] = logits(peft.PeftModel.from_pretrained(first.merge_and_unload(), tmp_path / "merged/adapter"))
    kept = (tmp_path / folder / "adapter" for folder in ("kept", "kept-two"))
    expected["kept"], again = (
        logits(peft.AutoPeftModelForCausalLM.from_pretrained(f, dtype=torch.float32)) for f in kept
    )
    torch.testing.assert_close(again, expected["kept"], rtol=0, atol=1e-5)
    for name, wanted in expected.items():
        found = logits(auto.from_pretrained(tmp_path / f"{name}-hf", dtype=torch.float32))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert (found - logits(auto.from_pretrained(tmp_path / "hf", dtype=torch.float32))).abs().max() > 0.01


def test_a_lora_run_goes_on_with_its_own_adapters_or_is_refused(home):
    flags = f"--objective sft --train-data-path chats.jsonl {LAYOUT} --save-interval 2"
    straight = trained(home, "lora", f"{flags} --lora-r 3 --lora-alpha 5 --base-weight-bits 4 --train-iters 4")
    shutil.copytree(home / "lora", home / "lora-on", ignore=shutil.ignore_patterns("iter_0000004", "lock"))
    (home / "lora-on/latest_checkpointed_iteration.txt").write_text("2")
    others = """
        --lora-r 4 | --lora-r is 4, --load lora-on has 3
        --lora-alpha 2 --lora-r 3 | is 2.0
        --lora-r 3 --base-weight-bits 8 | --base-weight-bits is 8, --load lora-on has 4
    """
    going_on = f"--load lora-on --save lora-on {flags} --train-iters 4"
    assert not_refused(table(others), lambda given: asked(home, f"{going_on} {given}")) == []
    again = trained(home, "lora-on", f"{flags} --train-iters 4", load="lora-on")
    assert [untimed(row) for row in again] == [untimed(row) for row in straight[2:]]


def tool(folder: Path, name: str, flags: str, *, status: int = 0) -> str:
    """What a program of tools/ says in `folder`."""
    code, output = run_forked(str(ROOT / f"tools/{name}.py"), *flags.split(), folder=folder, cwd=folder)
    assert code == status, output
    return output


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    timed = ("step_seconds", "tokens_per_second", "peak_memory_bytes", "rollout/seconds", "rollout/tokens_per_second")
    return {name: value for name, value in row.items() if name not in timed}


DPO = f"--objective dpo --train-data-path pairs.jsonl {LAYOUT}"


@pytest.fixture(scope="module")
def dpo(home) -> list[dict[str, Any]]:
    """Ten steps."""
    return trained(home, "dpo", f"{DPO} --train-iters 10")


def test_dpo_prefers_what_it_is_shown_and_a_reference_that_was_computed_before_changes_nothing(home, dpo):
    assert dpo[0]["lm_loss"] == pytest.approx(0.693147, abs=1e-5)
    assert dpo[-1]["rewards/accuracies"] > 0.9
    flags = f"{DPO} --train-iters 10 --precompute-ref-log-probs"
    before = trained(home, "dpo-2", flags)
    for one, other in zip(dpo, before, strict=True):
        assert one["lm_loss"] == pytest.approx(other["lm_loss"], abs=1e-5)
    code, output = post_train(home, "dpo-3", f"{flags} --valid-data-path pairs.jsonl --eval-iters 1 --eval-interval 10")
    assert code == 0, output
    assert "loading weights" not in output  # both files are the same pairs, which are known
    assert [untimed(row) for row in rows(home, "dpo-3")] == [untimed(row) for row in before]
    (validation,) = rows(home, "dpo-3", "validation.jsonl")
    assert validation["lm_loss"] < 0.6
    rounded = trained(home, "dpo-4", f"{flags} --lora-r 3 --base-weight-bits 4")  # another reference than the known one
    assert rounded[0]["lm_loss"] == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize(
    "extra",
    [
        "--steps-per-generation 2 --num-iterations 2 --beta 0.1",
        "--lora-r 4 --base-weight-bits 4 --beta 0.1 --steps-per-generation 2",
        "--sync-ref-model --ref-model-sync-steps 2 --beta 0.1 --steps-per-generation 2 --zeropp --emulate-nodes 2",
    ],
)
def test_a_run_that_goes_on_inside_a_buffer_repeats_the_straight_one_bit_for_bit(home, extra):
    flags = f"--objective grpo {DRAWN} --num-generations 4 {extra} --train-iters 5 --save-interval 3 {LAYOUT}"
    first_name, name = f"grpo{len(extra)}", f"again{len(extra)}"
    straight = trained(home, first_name, flags)
    shutil.copytree(home / first_name, home / name, ignore=shutil.ignore_patterns("iter_0000005", "lock"))
    (home / name / "latest_checkpointed_iteration.txt").write_text("3")
    again = trained(home, name, flags, load=name)
    assert [row["iteration"] for row in again] == [4, 5]
    assert [untimed(row) for row in again] == [untimed(row) for row in straight[3:]]
    shown = rows(home, first_name, "completions.jsonl")
    assert shown[0].keys() == {"iteration", "prompt", "completion", "rewards"}
    first = [row for row in shown if row["iteration"] == 1]
    assert [row["prompt"] for row in first] == [first[0]["prompt"]] * 4 + [first[4]["prompt"]] * 4  # whole groups
    assert len({row["completion"] for row in first}) > 2
    assert {row["rewards"]["vowels"] is None for row in shown} == {True, False}


def test_a_reference_that_follows_the_policy_is_mixed_after_its_steps_and_goes_on_on_any_layout(home, dpo):
    flags = f"{DPO} --train-iters 4 --save-interval 3"
    mixing = f"{flags} --sync-ref-model --ref-model-sync-steps 2 --ref-model-mixup-alpha 1"
    synced = trained(home, "dpo-synced", mixing)
    assert [untimed(row) for row in synced[:2]] == [untimed(row) for row in dpo[:2]]
    assert dpo[2]["rewards/margins"] > 0.01
    assert synced[2]["rewards/margins"] == 0.0  # the reference is the policy again
    (home / "dpo-synced" / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(ValueError, match="--no-sync-ref-model: --load dpo-synced was trained the other way"):
        asked(home, f"{flags} --load dpo-synced --save dpo-synced")
    shutil.rmtree(home / "dpo-synced" / "iter_0000004")
    shutil.move(home / "runs" / "dpo-synced", home / "runs" / "dpo-before")
    (again,) = trained(home, "dpo-synced", f"{mixing} --tensor-model-parallel-size 2", load="dpo-synced")
    assert again["rewards/margins"] == pytest.approx(synced[3]["rewards/margins"], rel=1e-3)
    assert synced[3]["rewards/margins"] > 1e-3


def test_a_failing_reward_function_is_reported_with_its_sample(home):
    (home / "broken.py").write_text("def f(completions, **_):\n    return [1.0]\n")
    flags = f"--objective grpo {DRAWN} --num-generations 4 --train-iters 1 {LAYOUT}"
    code, output = post_train(home, "broken", flags.replace("rewards.py:vowels", "broken.py:f"))
    assert (code, "Traceback" in output) == (2, False)
    assert re.search(r"reward function f gave 1 rewards for 4 completions, of \S*prompts\.jsonl, line ", output)


def asked(home: Path, flags: str) -> object:
    """What the program knows of a command line in `home` before it starts workers."""
    before = Path.cwd()
    os.chdir(home)
    try:
        return prepare(shlex.split(flags))
    finally:
        os.chdir(before)


TINY = f"@{ROOT}/configs/gpt_tiny.args --dry-run --nproc 4 --emulate-nodes 2 --zeropp"
# flags beside --load base and data of prompts, where nothing else is said
REFUSED = """
    --objective sft --load nowhere | --load nowhere has no checkpoint
    --objective sft --seq-length 8 | --seq-length 8: post-training has --max-length
    --objective grpo | --objective grpo needs --reward-funcs or --reward-load
    --objective grpo --reward-funcs a:b --max-completion-length 8 --num-generations 3 | divisible
    --objective grpo --reward-funcs rewards.py:vowels --max-length 8 | leaves no room for a prompt
    --objective sft --text-path chats.jsonl | --text-path and --mock-data are for pretraining
    --objective sft --hidden-size 64 | --hidden-size is 64, was 32
    --objective ppo --reward-funcs a:b --temperature 0 | --sample-temperature 0.0
    --objective sft --weights-on disk | --weights-on disk is for the weights of a reference or
    --objective grpo --reward-funcs a:b --weight-bits 8 | --weight-bits 8 is for the weights of a
    --objective dpo --lora-r 2 --weights-on host | with --lora-r the reference is the base
    --objective dpo --sync-ref-model --lora-r 2 | --sync-ref-model: with --lora-r the reference is
    --objective dpo --sync-ref-model --no-load-optim | --no-load-optim would leave its reference
    --objective dpo --sync-ref-model --weight-bits 8 | with --sync-ref-model the reference is
    --objective dpo --sync-ref-model --ref-load base | --ref-load base: the reference begins as
    --objective dpo | prompts.jsonl, line 1: there is no 'chosen', only 'prompt', 'word'
    --objective dpo --data-path same.jsonl | 'chosen' and 'rejected' are the same, first in line 1
    --objective sft --data-path broken.jsonl | broken.jsonl, line 2: not JSON
    --objective sft --data-path latin.jsonl | latin.jsonl, line 2: not UTF-8
    --objective sft --data-path empty.jsonl | empty.jsonl: there is no example
    --objective sft --train-data-path a --valid-data-path b | a cannot be read
    --objective sft --max-length 64 | --max-length 64 is longer than --max-position-embeddings 32
    --objective sft --save prompts.jsonl/a | --save: cannot write prompts.jsonl/a
    --objective sft --chat-template none.jinja | --chat-template none.jinja cannot be read
    --objective dpo --ref-load nowhere | --ref-load nowhere has no checkpoint
    --objective dpo --ref-ckpt-step 9 | --ref-ckpt-step 9:
    --objective sft --lora-r 2 --ref-checksum zzz | --ref-checksum zzz is no checksum of weights
    --objective sft --fp8-format hybrid --bf16 | --fp8-format hybrid needs an NVIDIA GPU
    --objective ppo --max-completion-length 8 --reward-load base | --reward-load base is no reward
    --objective ppo --max-completion-length 8 --reward-funcs rewards.py:nose | it has no function nose
    --objective sft --hidden-dropout 0.1 | --hidden-dropout 0.1: post-training drops nothing out
    --objective sft --lora-r 33 | --lora-r 33 is more than the smaller side of transformer.h.0.attn.c_attn, 32
    --objective sft --lora-r 2 --base-weight-bits 4 --tensor-model-parallel-size 2 --nproc 2 | --base-weight-bits 4: -
    TINY | --objective is missing
    TINY --objective dpo --weights-on disk | --dry-run reads no weights: --weights-on and --weight-bits are for
    TINY --objective dpo --dry-run-rank 4 | --dry-run-rank 4 is not a rank of the cluster: it has 0 to 3
"""


def test_what_cannot_be_is_refused_before_workers_start(home):
    def ask(flags: str) -> object:
        if flags.startswith("TINY"):
            return asked(home, flags.replace("TINY", TINY))
        load = "" if "--load" in flags.split() else "--load base"
        data = "" if "-path" in flags else "--data-path prompts.jsonl"
        return asked(home, f"--micro-batch-size 8 --train-iters 1 --nproc 1 --run-dir never {load} {data} {flags}")

    assert not_refused(table(REFUSED), ask) == []
    with pytest.raises(ValueError, match="--load is missing"):
        asked(home, "--objective sft --data-path prompts.jsonl")
    assert not (home / "never").exists()
    code, output = run_forked(str(ROOT / "tools/post_train.py"), "--load", "base", folder=home, cwd=home)
    assert (code, output.count("\n")) == (2, 1)
    assert output.startswith("post_train.py: error: --objective is missing")


def test_a_dry_run_needs_no_checkpoint(home, capsys):
    for flags, said in (
        (f"@{ROOT}/configs/post_training/lora_base_8bit.args", " MB of frozen weights"),
        ("--objective ppo --reward-load r", "MB at the fullest moment ("),
    ):
        assert asked(home, f"{TINY} {flags}") == 0
        assert said in capsys.readouterr().out


def test_a_plan_has_the_memory_of_all_models(home, capsys):
    flags = "--objective ppo --reward-load base --load base --train-data-path prompts.jsonl --train-iters 1 --plan"
    layout = "--nproc 4 --micro-batch-size 1 --max-completion-length 8 --weights-on disk --weight-bits 8"
    for lora in ("", "--lora-r 4 --base-weight-bits 4"):
        assert asked(home, f"{flags} {layout} {lora}") == 0
        output = capsys.readouterr().out
        rows = {line.split("  ")[0] for line in output.splitlines()}
        assert {"keys and values", "reward model", "total"} <= rows
        assert ("frozen base" in rows) == bool(lora) == ("reference model" not in rows)
        assert ("best with these flags" in output or "nothing says what is fastest" in output) == (not lora)


def start(home: Path, flags: str, *, restarted: bool = False) -> tuple[ParsedRun, LoadSource]:
    """A command line and the checkpoint that it begins with."""
    parsed = parse_run_config(f"--load {home}/base {flags}".split(), home, extra=EXTRA, default_file=None)
    return find_start(parsed, restarted=restarted)[:2]


def test_a_restarted_job_goes_on_with_what_it_has_saved_and_else_begins_with_weights_alone(home):
    _, source = start(home, f"--objective sft --save {home}/never-saved", restarted=True)
    assert not source.continues
    assert not source.optimizer
    assert start(home, f"--objective sft --save {home}/base", restarted=True)[1].continues


def test_defaults_are_those_of_the_objective_and_the_model_is_the_checkpoint_s(home):
    (grpo, _), (ppo, _) = start(home, "--objective grpo"), start(home, "--objective ppo --temperature 0.7 --lr 1e-3")
    post: PostTrainingConfig = post_configs(grpo).training
    assert (post.beta_or_default, post.loss, post.num_generations, post.needs_reference) == (0.0, "dapo", 8, False)
    assert grpo.config.schedule.lr == 1e-6
    sample = grpo.config.sample
    assert (sample.sample_temperature, sample.sample_top_k, sample.sample_top_p) == (1.0, 0, 1.0)
    assert (ppo.config.sample.sample_temperature, ppo.config.schedule.lr) == (0.7, 1e-3)
    assert grpo.config.model.hidden_size == 32
    assert grpo.config.model.hidden_dropout == 0.0
    assert grpo.config.data.seq_length == post_configs(grpo).form.max_length == 32
    assert (post.ref_load, post.ref_ckpt_step) == (str(home / "base"), 2)
    assert grpo.config.checkpoint.finetune
