"""Test the estimate of a run: bytes per node and times, for the run itself and for the run with other schemes.

The times are estimated with and without a described device.
"""

import dataclasses
import math

import pytest
from helpers.small_run import parse

from megazpp.diloco.config import DilocoConfig
from megazpp.planner.estimate import Estimate, Estimator, build_step_simulator
from megazpp.planner.simulator import LOSSLESS_SHARES, Memory, lossless_share
from megazpp.planner.step import measure
from megazpp.planner.trace import trace_model
from megazpp.planner.variants import INT8, LOSSLESS, changed, local_steps, schemes
from megazpp.run.arguments import RunConfig
from megazpp.run.checks import plan_run
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.topology.cluster_file import read_cluster
from megazpp.training.flops import model_flops_per_token

DEVICE = Device("a GPU", teraflops=10.0, gigabytes=1.0, gigabytes_per_second=100.0)
LINKS = Links(domain=Link(100.0), network=Link(0.1))
PAIR = Cluster(num_nodes=2, ranks_per_node=2)
FOUR_NODES = Cluster(num_nodes=4, ranks_per_node=2)
ACROSS = "--zeropp --context-parallel-size 8 --allow-cp-across-nodes --num-attention-heads 8"


def config(flags: str = "") -> RunConfig:
    sizes = "@configs/gpt_tiny.args --bf16 --global-batch-size 32 --micro-batch-size 8"
    return parse(f"{sizes} {flags}").config


def estimate(run: RunConfig, cluster: Cluster = PAIR) -> Estimate:
    return Estimator(cluster, device_type="cpu").estimate(run)


def exposed(estimate: Estimate) -> dict[str, float]:
    return Estimator(estimate.plan.layout.cluster, device_type="cpu").exposed(estimate)


def pair(links: Links | None = LINKS, device: Device | None = DEVICE) -> Cluster:
    return Cluster(num_nodes=2, ranks_per_node=2, links=links, device=device)


@pytest.mark.parametrize("flags", ["", "--zeropp", "--tensor-model-parallel-size 2", "--hsdp", ACROSS])
def test_node_cross_bytes_equal_the_sum_over_its_ranks(flags):
    """Compare a node's estimated bytes, which are scaled from one simulated rank, with a simulation of all ranks."""
    run, cluster = config(f"--micro-batch-size 4 {flags}"), Cluster(num_nodes=2, ranks_per_node=4)
    plan, own, crossing = plan_run(run, cluster, device_type="cpu"), estimate(run, cluster), 0
    for rank in range(cluster.world_size):
        traffic = measure(build_step_simulator(run, plan, device_type="cpu", rank=rank), own.micro_batches).traffic
        crossing += sum(counted.sent_bytes for (wire, _, _), counted in traffic.items() if wire == "cross")
    assert own.node_cross_bytes == round(crossing / cluster.num_nodes)


@pytest.mark.parametrize(("links", "device", "usable"), [(None, DEVICE, 0.9), (LINKS, None, math.inf)])
def test_bytes_and_memory_need_no_links_or_device_but_times_do(links, device, usable):
    own = estimate(config("--zeropp"), pair(links, device))
    assert (own.seconds, own.busy, exposed(own), own.tokens_per_second) == (None, {}, {}, 0.0)
    assert own.wires["cross"] > 0
    assert own.memory.total() > 0
    assert own.usable_gigabytes == usable
    assert own.fits


def test_one_gpu_needs_no_links_for_times():
    alone = Cluster(num_nodes=1, ranks_per_node=1, device=DEVICE)
    assert estimate(config(), alone).seconds > 0


def test_missing_link_or_host_is_named_with_the_cluster_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text("""
nodes: 2
ranks_per_node: 2
links: {network: {gigabytes_per_second: 1}}
device: {name: a GPU, teraflops: 10, gigabytes: 1, gigabytes_per_second: 100}
""")
    with pytest.raises(ValueError, match=rf"--cluster-file {path} lacks links\.domain, which the axis \w+ uses"):
        estimate(config(f"--cluster-file {path}"), read_cluster(str(path)))
    offloaded = config(f"--cluster-file {path} --optimizer-cpu-offload")
    with pytest.raises(ValueError, match=rf"--cluster-file {path} lacks `host`"):
        estimate(offloaded, pair())


def test_tokens_and_flops_per_second_follow_from_step_seconds():
    own, model = estimate(config(), pair()), config().model
    assert own.tokens_per_second == pytest.approx(32 * 128 / own.seconds)
    flops = model_flops_per_token(model, padded_vocab_size=model.padded_vocab_size(2048, 1), seq_length=128)
    assert own.teraflops == pytest.approx(flops * own.tokens_per_second / 4 * 1e-12)
    assert 0 < exposed(own)["shard"] <= own.seconds


def test_schemes_change_only_sharding_and_share_one_trace():
    run = config("--zeropp --zero-gradient-bits 8 8")
    found = schemes(run)
    assert list(found) == ["ZeRO-3", "ZeRO-1", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp", INT8, LOSSLESS]
    assert found["--zeropp"] == run
    assert len({(other.zero, other.parallel) for other in found.values()}) == 9
    deltas = {name: other.zero.zero_weight_delta for name, other in found.items()}
    assert deltas == dict.fromkeys(found, "auto") | {INT8: "none", LOSSLESS: "lossless"}
    assert not {INT8, LOSSLESS} & schemes(changed(run, precision={"bf16": False})).keys()
    trace_model.cache_clear()
    for other in found.values():
        estimate(other)
        assert (other.model, other.batches, other.precision) == (run.model, run.batches, run.precision)
        assert other.zero.zero_gradient_bits == (8, 8)
    assert trace_model.cache_info().misses == 1


def test_auto_weight_delta_follows_dtype_memory_and_step_time():
    lossless, int8, fp32 = "lossless deltas, because ", "int8 blocks, because ", "@configs/gpt_tiny.args"
    fast = Links(domain=Link(0.01), network=Link(100000.0, microseconds=0.1))
    small = DEVICE._replace(gigabytes=0.001)
    alike = Links(domain=Link(10.0), network=Link(0.03))
    slow, quick = (
        DEVICE._replace(encode_gigabytes_per_second=rate, decode_gigabytes_per_second=rate) for rate in (0.01, 10.0)
    )
    bf16, unknown = "@configs/gpt_tiny.args --bf16", "the speed of the links is unknown"
    steps, communication = "a step is estimated to take ", "the communication of a step is estimated to take "
    for flags, cluster, gigabytes, said in [
        (f"{bf16} --zeropp", pair(None, None), None, lossless + unknown),
        (f"{bf16} --zeropp --zero-weight-delta auto", pair(None, None), None, lossless + unknown),
        (f"{fp32} --fp16 --zeropp", pair(None, DEVICE), None, lossless + unknown),
        (f"{bf16} --zeropp", pair(LINKS._replace(domain=None), DEVICE), None, lossless + unknown),
        (f"{bf16} --zeropp", pair(None, None), 1.0, lossless + unknown),
        (f"{bf16} --zeropp", pair(None, None), 0.001, int8 + "lossless deltas would need "),
        (f"{bf16} --zeropp", pair(LINKS, small), None, int8 + "lossless deltas would need "),
        (f"{bf16} --zeropp", pair(LINKS, DEVICE), None, lossless + steps),
        (f"{bf16} --zeropp --optimizer-cpu-offload", pair(LINKS, DEVICE), None, lossless + steps),
        (f"{bf16} --zeropp", pair(LINKS, None), None, lossless + communication),
        (f"{bf16} --zeropp", pair(fast, DEVICE), None, int8 + steps),
        (f"{bf16} --zeropp", pair(fast, None), None, int8 + communication),
        # the slow device encodes lossless deltas more slowly than the link would send quantized weights
        (f"{bf16} --zeropp", pair(alike, slow), None, int8 + steps),
        (f"{bf16} --zeropp", pair(alike, quick), None, lossless + steps),
        (f"{fp32} --zeropp", pair(LINKS, DEVICE), None, int8 + "with float32 compute nearly all weights change"),
        (bf16, pair(LINKS, DEVICE), None, None),
        (f"{bf16} --zeropp", Cluster(num_nodes=1, ranks_per_node=4), None, None),
        (f"{bf16} --zeropp --zero-weight-delta lossless", pair(), None, None),
        (f"{bf16} --zeropp --zero-weight-delta none", pair(), None, None),
        (f"{bf16} --zeropp --zero-quantized-weights", pair(), None, None),
        (f"{bf16} --zeropp --no-zero-quantized-weights", pair(), None, None),
        (f"{bf16} --zeropp --zero-weight-bits 8", pair(), None, None),
        (f"{bf16} --zeropp --zero-hpz-partition-size 1", pair(), None, None),
    ]:
        run, where = parse(flags).config, (flags, cluster.links, cluster.device, gigabytes)
        found = Estimator(cluster, device_type="cpu").choose_weight_delta(run, gigabytes=gigabytes)
        if said is None:
            assert found is None, where
        else:
            assert found is not None, where
            start = f"--zero-weight-delta auto: weights cross nodes as {said}"
            assert found.describe().startswith(start), (where, found)
    # With --zero-weight-delta auto, the estimate of a run equals the estimate with the chosen format.
    run = parse(f"{bf16} --zeropp").config
    for links, delta in ((LINKS, "lossless"), (fast, "none")):
        own, chosen = (estimate(r, pair(links)) for r in (run, changed(run, zero={"zero_weight_delta": delta})))
        assert (own.seconds, own.node_cross_bytes, own.memory) == (
            chosen.seconds,
            chosen.node_cross_bytes,
            chosen.memory,
        )
        assert own.plan.wire.gather == chosen.plan.wire.gather


def test_lossless_share_interpolates_between_learning_rates():
    assert lossless_share(1e-5) == LOSSLESS_SHARES[1e-5]
    assert LOSSLESS_SHARES[1e-5] < lossless_share(3e-5) < LOSSLESS_SHARES[1e-4]
    assert (lossless_share(1e-9), lossless_share(1.0)) == (LOSSLESS_SHARES[1e-6], LOSSLESS_SHARES[3e-3])


# ---- estimates of DiLoCo ---------------------------------------------------------------------------------------------

EVERY = "--diloco-steps 4 --micro-batch-size 4"


def test_replica_group_bytes_are_two_4_bit_hops_averaged_over_steps():
    run = config(f"{EVERY} --diloco-replica-groups 2")
    rarely = run.with_section(dataclasses.replace(run.section(DilocoConfig), diloco_steps=8))
    own, rarer = estimate(run, FOUR_NODES), estimate(rarely, FOUR_NODES)
    # elements of the whole model: bytes of a rank's fp32 parameters / 4 bytes, times the 4 ranks of a replica group
    parameters = own.memory[Memory.PARAMETERS] / 4 * 4
    # Two hops of 4-bit values with scales per block of 128. In each hop a group sends (2 - 1) / 2 of its message to the
    # other one of the two groups. The two nodes of a group share these bytes.
    per_node = 2 * (0.5 + 2 / 128) * parameters * (2 - 1) / 2 / 2
    # The tolerance is for one-dimensional parameters, which are sent exactly, without quantization.
    assert own.node_replica_group_bytes == pytest.approx(per_node, rel=0.05)
    assert rarer.node_replica_group_bytes == own.node_replica_group_bytes
    # bytes per step that ZeRO sends between the two nodes of a replica group
    each_step = own.node_cross_bytes - own.node_replica_group_bytes / 4
    assert each_step == pytest.approx(rarer.node_cross_bytes - own.node_replica_group_bytes / 8)
    assert each_step > 0
    assert own.wires["cross"] * 2 >= own.node_replica_group_bytes / 4


def test_synchronization_delays_steps_unless_its_delay_hides_it():
    # a network so slow that the synchronization takes longer than two steps
    slow = pair(Links(domain=Link(100.0), network=Link(0.002)))
    delays = ("", "--diloco-fragment-sync-delay 2", "--diloco-fragment-sync-delay 2 --diloco-fragments 2")
    plain, late, parts = (estimate(config(f"{EVERY} {delay}"), slow) for delay in delays)
    assert exposed(plain)["replica_group"] == pytest.approx(plain.held_up / 4, rel=0.01)
    assert plain.busy["replica_group"] == pytest.approx(late.busy["replica_group"])
    step = plain.seconds - plain.held_up / 4
    # `step` includes time of ZeRO's collectives, so the next assertion shows that the synchronization overlaps with
    # them as well
    assert 0 < exposed(plain)["shard"] < step
    assert late.held_up == pytest.approx(plain.held_up - 2 * step, rel=0.01)
    # Each of the two fragments overlaps with two steps of compute, so four steps are hidden.
    assert parts.held_up == pytest.approx(plain.held_up - 4 * step, rel=0.01)
    assert plain.sufficient_gigabits * 0.05 * 4 == pytest.approx(late.sufficient_gigabits * 2, rel=0.01)
    assert late.sufficient_gigabits == pytest.approx(2 * parts.sufficient_gigabits, rel=0.01)
    untimed = estimate(config(EVERY))
    assert (untimed.seconds, untimed.node_replica_group_bytes) == (None, plain.node_replica_group_bytes)


def test_local_steps_are_estimated_next_to_schemes_without_them():
    own = config("--diloco-steps 8 --diloco-fragment-sync-delay 3 --diloco-replica-groups 2 --zeropp")
    plain = changed(own, zero={"zeropp": False})
    assert local_steps(own, Cluster(num_nodes=1, ranks_per_node=4)) == {}
    assert local_steps(own, FOUR_NODES) == {"--diloco-steps 8": own}
    assert local_steps(plain, FOUR_NODES) == {"--diloco-steps 8": plain}
    ((name, usual),) = local_steps(config("--zeropp"), FOUR_NODES).items()
    assert (name, usual.section(DilocoConfig).diloco_steps, usual.zero.zeropp) == ("--diloco-steps 30", 30, False)
    assert {other.section(DilocoConfig).diloco_steps for other in schemes(own).values()} == {None}


@pytest.mark.parametrize(
    ("name", "dropout", "masked"),
    [("H100-SXM5-80GB", 0, False), ("H100-SXM5-80GB", 0.1, True), ("V100-SXM3-32GB", 0, True), (None, 0, True)],
)
def test_document_memory_follows_the_devices_attention_kernel(name, dropout, masked):
    cluster = pair(None, name and DEVICE._replace(name=name))
    # Without --compile the loss has the memory peak, during which the masks of both layers exist.
    flags = f"--attention-dropout {dropout} --micro-batch-size 1 --no-compile"
    plain, own = (estimate(config(f"{flags} {more}"), cluster) for more in ("", "--reset-attention-mask"))
    extra = own.memory.total() - plain.memory.total()
    mask = 128 * 128 * 2 * 2  # bytes of the 128 x 128 masks of two layers, in bf16
    assert extra >= mask if masked else extra == 0


# The values of LARGE_VOCABULARY and the last items of the entries of ALLOCATED are peak bytes of torch's allocator.
# They were measured with torch 2.11 for four steps, with a fake CUDA driver that computes nothing. cuBLAS keeps two
# workspaces of 32 MiB on an H100: one for the thread of forward, and one for the thread of backward.
WORKSPACES = 2 * 2**25
LARGE_VOCABULARY = {
    "": 1_017_046_016,
    "--no-compile": 1_150_917_632,
    "--untie-embeddings-and-output-weights": 1_377_625_600,
    "--untie-embeddings-and-output-weights --no-compile": 1_511_497_216,
}
GATED = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --micro-batch-size 4"
GATED += " --seq-length 512 --max-position-embeddings 512"  # activations take a third of the memory
ALLOCATED = [
    ("", 1, 1, 559_367_168),
    (f"--optimizer-cpu-offload {GATED}", 1, 1, 501_118_976),
    ("--optimizer-cpu-offload", 1, 1, 253_534_720),
    ("--optimizer-cpu-offload", 1, 2, 183_940_608),
    ("--optimizer-cpu-offload --zeropp", 2, 1, 308_221_952),
    ("--optimizer-cpu-offload --zeropp --zero-offload-partial-sums", 2, 1, 237_867_520),
    ("--optimizer-cpu-offload --zeropp --zero-offload-partial-sums --zero-weight-delta none", 2, 1, 212_670_976),
]


@pytest.mark.parametrize(("flags", "nodes", "ranks_per_node", "allocated"), ALLOCATED)
def test_planned_memory_of_states_in_host_memory_is_the_allocators(flags, nodes, ranks_per_node, allocated):
    model = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 64 --max-position-embeddings 64"
    run = "--micro-batch-size 1 --global-batch-size 4 --bf16 --hidden-dropout 0 --attention-dropout 0 --lr 3e-3"
    dropped = "" if "--zeropp" not in flags else "--no-zero-error-feedback"
    small = parse(f"{model} {run} {flags} {dropped} --train-iters 4 --mock-data --vocab-size 256").config
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks_per_node)
    planned = Estimator(cluster, device_type="cuda").estimate(small).memory.total()
    assert planned == pytest.approx(allocated - WORKSPACES, rel=0.02)


@pytest.mark.parametrize(("flags", "allocated"), LARGE_VOCABULARY.items())
def test_planned_memory_of_a_large_vocabulary_is_the_allocators(flags, allocated):
    """Compare planned memory with measured memory, with and without torch.compile.

    torch.compile fuses the loss, so a compiled run has no fp32 logits. They take 12 % of the memory of an eager run.
    """
    model = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512"
    run = f"--micro-batch-size 4 --global-batch-size 4 --bf16 --lr 1e-4 --train-iters 4 --vocab-size 50257 {flags}"
    cluster = Cluster(num_nodes=1, ranks_per_node=1)
    planned = Estimator(cluster, device_type="cuda").estimate(parse(f"{model} {run} --mock-data").config)
    assert planned.memory.total() == pytest.approx(allocated - WORKSPACES, rel=0.02)
