"""Test the means over a log interval, metrics.jsonl and summary.json, log lines, model FLOPs and peak rates."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from helpers.metrics import meter, step
from helpers.training import GPT2_STYLE, LLAMA_STYLE
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megazpp.model.config import GPTConfig
from megazpp.model.gpt import GPTModel
from megazpp.tensor_parallel.initialize import initialize_parameters_
from megazpp.training.flops import mfu_convention, model_flops_per_token, peak_flops
from megazpp.training.metrics import INNER_LOSS, NOTHING_SENT, perplexity, validation_lines
from megazpp.training.metrics_logger import memory_line, peak_memory_bytes
from megazpp.training.results import closing_lines

CPU = torch.device("cpu")


def test_interval_has_loss_of_taken_steps_total_time_and_largest_norm():
    record = meter(
        step(1, loss=4.0, seconds=0.125, grad_norm=7.25),
        step(2, loss=math.inf, seconds=0.25, grad_norm=None, skipped=True),
        step(3, loss=2.0, seconds=0.375, grad_norm=1.5),
    ).interval()
    fields = record.fields
    assert (fields["lm_loss"], fields["step_seconds"], fields["skipped"]) == (3.0, 0.25, 1)
    assert (fields["grad_norm"], fields["max_grad_norm"]) == (1.5, 7.25)
    assert fields["tokens_per_second"] == 3200.0
    assert "| max grad norm: 7.250 |" in record.line
    assert record.short_line == (  # the short line for a terminal, which has at most 100 columns
        "iteration      3/500  loss  3.0000  grad norm  1.500      3,200 tokens/s  0:02:04 left  1 skipped"
    )


def test_interval_starts_after_the_last_one_and_estimates_the_time_left():
    filled = meter(step(1, loss=4.0), step(2, loss=2.0))
    filled.interval()
    # the remaining 3000 samples need 750 steps of 4 samples and 0.5 s each: 0:06:15
    filled.add(step(3, loss=1.0, global_batch_size=4, consumed_samples=1000))
    interval = filled.interval()
    assert interval.fields["lm_loss"] == 1.0
    assert "eta: 0:06:15 |" in interval.line


def test_metrics_have_exactly_the_documented_fields():
    sent, steps = NOTHING_SENT | {"tp": 30, "cross": 10, "local": 20}, (step(1), step(2, skipped=True))
    record = meter(*steps, peak_flops=1.6e12).interval(sent, peak_memory_bytes=7)
    assert record.fields == {
        "iteration": 2,
        "lm_loss": 10.0,
        "grad_norm": 1.0,
        "max_grad_norm": 1.0,
        "learning_rate": 1.5e-4,
        "global_batch_size": 8,
        "consumed_samples": 16,
        "consumed_tokens": 1600,
        "steps": 2,
        "step_seconds": 0.5,
        "tokens_per_second": 1600.0,
        "skipped": 1,
        "tp_bytes": 15,
        "cross_bytes": 5,
        "local_bytes": 10,
        "peak_memory_bytes": 7,
        "mfu": 0.5,
    }
    plain = meter(step(1, loss_scale=4.0)).interval()
    assert plain.fields.keys() == record.fields.keys() - {"mfu"} | {"loss_scale"}


def test_summary_covers_all_intervals_and_counts_the_steps_tokens():
    filled = meter(step(1, tokens=90, wait_seconds=0.25))
    filled.interval(NOTHING_SENT | {"tp": 10, "cross": 4, "local": 2})
    filled.add(step(2, tokens=210, seconds=1.5, skipped=True))
    assert filled.interval().fields["tokens_per_second"] == 140.0
    assert filled.summary(cpu_seconds=1.5) == {
        "iterations": 2,
        "skipped": 1,
        "tokens": 300,
        "seconds": 2.0,
        "tokens_per_second": 140.0,
        "cpu_seconds_per_token": 0.005,
        "data_wait_share": 0.125,
        "tp_bytes_per_step": 5,
        "cross_bytes_per_step": 2,
        "local_bytes_per_step": 1,
    }


def test_speed_of_steps_without_time_or_samples_is_zero():
    record = meter(step(1, seconds=0.0, global_batch_size=0), peak_flops=1e12).interval()
    assert (record.fields["tokens_per_second"], record.fields["mfu"]) == (0.0, 0.0)
    assert record.line.endswith("eta: 0:00:00 |")
    assert meter(step(1, seconds=0.0)).summary(cpu_seconds=0.0)["tokens_per_second"] == 0.0


def test_optional_numbers_of_the_last_step_are_recorded():
    fields = meter(step(1, params_norm=1.0), step(2, num_zeros=0.0, params_norm=345.5)).interval().fields
    assert (fields["num_zeros"], fields["params_norm"]) == (0.0, 345.5)


def test_largest_norm_of_an_interval_ignores_nan():
    for norms, largest in (((1.0, math.nan, 3.0), 3.0), ((math.nan, 2.0), 2.0), ((math.nan, math.inf), math.inf)):
        assert meter(*(step(grad_norm=norm) for norm in norms)).interval().fields["max_grad_norm"] == largest
    assert math.isnan(meter(step(grad_norm=math.nan)).interval().fields["max_grad_norm"])


def test_loss_that_is_not_per_token_is_printed_without_a_perplexity():
    line = validation_lines("iteration 7", 0.5, has_perplexity=False)[1]
    assert line == " validation loss at iteration 7 | lm loss value: 5.000000E-01 | "


def test_run_speed_excludes_the_first_step_which_compiles():
    for seconds, speed in (((60.0, 0.5, 1.5), 2 * 800 / 2.0), ((4.0,), 800 / 4.0), ((), 0.0)):
        summary = meter(*(step(seconds=each) for each in seconds)).summary(cpu_seconds=0.0)
        assert (summary["tokens_per_second"], summary["seconds"]) == (speed, sum(seconds))
        assert summary["cpu_seconds_per_token"] == 0.0


def test_log_line_begins_with_megatrons_line_byte_for_byte():
    assert meter(step(10, loss=10.43287, grad_norm=2.71828)).interval().line == (
        " iteration       10/     500 | consumed samples:           80 | elapsed time per iteration (ms): 500.0 |"
        " learning rate: 1.500E-04 | global batch size:     8 | lm loss: 1.043287E+01 | loss scale: 1.0 |"
        " grad norm: 2.718 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        " max grad norm: 2.718 | tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | eta: 0:04:05 |"
    )
    assert "grad norm" not in meter(step(1, grad_norm=None)).interval().line
    everything = step(1, num_zeros=12.0, params_norm=345.6789, loss_scale=65536.0)
    # the log line omits wires over which nothing was sent, here `cross`
    sent = NOTHING_SENT | {"tp": 2_500_000, "local": 1_250_000}
    line = meter(everything, peak_flops=1.6e12).interval(sent, peak_memory_bytes=3_210_000_000).line
    assert line.endswith(
        " loss scale: 65536.0 | grad norm: 1.000 | num zeros: 12.0 | params norm: 345.679 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 | max grad norm: 1.000 |"
        " tokens/s per rank: 400.0 | model TFLOP/s per rank: 0.8000 | MFU: 50.0% | max memory (GB): 3.21 |"
        " tp MB per step: 2.500 | intra-node MB per step: 1.250 | eta: 0:04:10 |"
    )


def test_synchronizations_appear_in_log_line_record_and_summary():
    filled = meter(step(1), step(2, metrics={INNER_LOSS: 3.5}), step(3), step(4, metrics={INNER_LOSS: 2.5}))
    interval = filled.interval(NOTHING_SENT | {"cross": 8_000_000, "replica_group": 8_000_000})
    assert " inner_loss: 3 | synchronizations: 2 | loss scale" in interval.line
    assert " inter-node MB per step: 2.000 | replica-group MB per step: 2.000 |" in interval.line
    found = interval.fields
    assert (found["inner_loss"], found["synchronizations"], found["replica_group_bytes"]) == (3.0, 2, 2_000_000)
    summary = filled.summary(cpu_seconds=1.0)
    assert (summary["inner_loss"], summary["synchronizations"], summary["replica_group_bytes_per_step"]) == (
        2.5,
        2,
        2_000_000,
    )
    lines = closing_lines(
        summary | {"stop_reason": None, "final_loss": 2.5, "validation_loss": None}, trained=True, unit=""
    )
    assert "replica groups synchronized 2 times, 2.000 MB per node and step between them; inner loss 2.5000" in lines
    assert lines.endswith("training loss of the last log interval: 2.5000")  # a loss without a unit, such as DPO's


def test_loss_that_is_not_finite_is_printed():
    for loss in (math.nan, math.inf):
        line = meter(step(1, loss=loss, grad_norm=math.nan, skipped=True)).interval().line
        assert f" lm loss: {str(loss).upper()} |" in line
        assert " grad norm: nan | number of skipped iterations:   1 | number of nan iterations:   1 |" in line


def test_validation_lines_match_megatron_with_capped_or_nan_perplexity():
    rule, line, again = validation_lines("iteration 100", 2.5)
    assert line == " validation loss at iteration 100 | lm loss value: 2.500000E+00 | lm loss PPL: 1.218249E+01 | "
    assert rule == again == "-" * (len(line) + 1)
    assert perplexity(100.0) == math.exp(20)
    assert math.isnan(perplexity(math.nan))


def test_cpu_peak_memory_is_the_kernels_high_water_mark_in_bytes():
    kibibytes = int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1))
    assert peak_memory_bytes(CPU) == pytest.approx(1024 * kibibytes, rel=0.05)


@pytest.mark.gpu
def test_memory_line_matches_megatrons():
    line = memory_line(3, 10, torch.device("cuda"))
    names = ("allocated", "max allocated", "reserved", "max reserved")
    fields = "".join(rf" \| {name}: \d+\.\d\d" for name in names)
    assert re.fullmatch(rf"\[Rank 3\] \(after 10 iterations\) memory \(MB\){fields}", str(line))


def test_model_flops_count_matrix_products_and_half_of_the_attention():
    for config in (GPT2_STYLE, LLAMA_STYLE):
        model, ids = GPTModel(config, vocab_size=96), torch.arange(17).unsqueeze(0)
        initialize_parameters_(model, seed=1, draw_device=CPU)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(ids[:, :-1], ids[:, 1:]).sum().backward()
        # attention has two matrix products (scores, weighted sum), each once in forward and twice in backward
        products = 2 * 3
        attention = products * 2 * config.heads * config.head_size * 16 * config.layers
        expected = counter.get_total_flops() / 16 - attention / 2
        assert model_flops_per_token(config, padded_vocab_size=96, seq_length=16) == expected


def test_attention_window_counts_only_keys_inside_it():
    """Compare the FLOPs of windowed attention with counted pairs of a token and a key inside its window.

    Full causal attention over S tokens counts as half of the S x S pairs.
    """
    whole = dataclasses.replace(LLAMA_STYLE, num_layers=3)
    windows = dataclasses.replace(whole, window_size="4,0", window_attn_skip_freq="3")
    less = sum(16 / 2 - sum(min(token + 1, 5) for token in range(16)) / 16 for _ in range(2))
    counts = [model_flops_per_token(each, padded_vocab_size=96, seq_length=16) for each in (whole, windows)]
    assert counts[0] - counts[1] == 6 * 2 * whole.heads * whole.head_size * less
    inside = dataclasses.replace(whole, window_size="15,0")
    assert model_flops_per_token(inside, padded_vocab_size=96, seq_length=16) == counts[0]


def test_gpt3_175b_flops_match_megatrons_figure():
    # arXiv 2104.04473 gives 72 B s l h^2 (1 + s / 6h + V / 12lh) FLOPs per batch. This project counts half of the
    # attention term s / 6h, because attention is causal.
    layers, h, s, vocab = 96, 12288, 2048, 51200
    model = GPTConfig(num_layers=layers, hidden_size=h, num_attention_heads=96)
    ours = model_flops_per_token(model, padded_vocab_size=vocab, seq_length=s)
    assert ours == pytest.approx(72 * layers * h**2 * (1 + s / (12 * h) + vocab / (12 * layers * h)), rel=1e-12)


def test_peak_flops_match_the_named_device_or_are_none():
    bf16, fp16 = torch.bfloat16, torch.float16
    for name, dtype, tflops in (
        ("NVIDIA A100 80GB PCIe", bf16, 312),
        ("NVIDIA H100 80GB HBM3", bf16, 989),
        ("NVIDIA H100 PCIe", fp16, 756),
        ("NVIDIA H200 NVL", bf16, 835),
        ("NVIDIA GH200 480GB", bf16, 989),
        ("Tesla V100-SXM2-16GB", fp16, 125),
        ("NVIDIA GB200", bf16, None),
        ("NVIDIA A1000 Laptop GPU", bf16, None),
        ("NVIDIA L40", bf16, None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", bf16, None),
        ("NVIDIA A100-SXM4-80GB", torch.float32, None),
        ("Tesla V100-SXM2-16GB", bf16, None),
    ):
        assert peak_flops(name, dtype) == (None if tflops is None else tflops * 1e12), (name, dtype)


def test_mfu_convention_explains_mfu_or_its_absence():
    known, unknown = (mfu_convention(6_000_000, *of) for of in (("NVIDIA H200", 989e12), ("cpu", None)))
    assert "6.0000E+06 per token" in known
    assert "MFU = model FLOP/s / 989 TFLOP/s, the dense 16-bit peak of NVIDIA H200" in known
    assert "no MFU: the peak of cpu" in unknown
