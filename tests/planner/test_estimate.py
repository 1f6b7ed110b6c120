"""One run, estimated: bytes of a node from those of one rank, times where they are known, and the schemes beside it."""

import math
from pathlib import Path

import pytest

from megazpp.base.arguments import RunConfig, parse_run_config
from megazpp.base.checks import check_run_config
from megazpp.planner.estimate import Estimate, Estimator, paper_step
from megazpp.planner.paper import LOSSLESS_SHARES, Memory, lossless_share
from megazpp.planner.step import measure
from megazpp.planner.trace import trace_model
from megazpp.planner.variants import changed, local_steps, schemes
from megazpp.topology.cluster import Cluster, Device, Link, Links
from megazpp.training.flops import model_flops_per_token

ROOT = Path(__file__).resolve().parents[2]
DEVICE = Device("a GPU", teraflops=10.0, gigabytes=1.0, gigabytes_per_second=100.0)
LINKS = Links(domain=Link(100.0), network=Link(0.1))


def config(*flags: str) -> RunConfig:
    sizes = ["--num-layers", "2", "--global-batch-size", "32", "--micro-batch-size", "8"]
    return parse_run_config(["@configs/gpt_tiny.args", "--bf16", *sizes, *flags], ROOT).config


def estimator(cluster: Cluster) -> Estimator:
    return Estimator(cluster, device_type="cpu")


def test_a_node_sends_to_others_what_its_ranks_send_together():
    cluster = Cluster(num_nodes=2, ranks_per_node=4)
    made = estimator(cluster)
    for flags in ([], ["--zeropp"], ["--tensor-model-parallel-size", "2"], ["--hsdp"]):
        run = config("--micro-batch-size", "4", *flags)
        plan, own = check_run_config(run, cluster, device_type="cpu"), made.estimate(run)
        crossing = 0
        for rank in range(cluster.world_size):
            traffic = measure(paper_step(run, plan, device_type="cpu", rank=rank), own.micro_batches).traffic
            crossing += sum(counted.sent_bytes for (wire, _, _), counted in traffic.items() if wire == "cross")
        assert own.node_cross_bytes == round(crossing / cluster.num_nodes), flags


def test_without_links_or_device_bytes_and_memory_are_there_and_times_are_not():
    for cluster in (
        Cluster(num_nodes=2, ranks_per_node=2, device=DEVICE),
        Cluster(num_nodes=2, ranks_per_node=2, links=LINKS),
    ):
        own = estimator(cluster).estimate(config("--zeropp"), exposed=True)
        assert (own.seconds, own.busy, own.exposed, own.tokens_per_second) == (None, {}, {}, 0.0)
        assert own.wires["cross"] > 0
        assert own.memory.total() > 0
        assert own.usable_gigabytes == (math.inf if cluster.device is None else 0.9 * DEVICE.gigabytes)
        assert own.fits


def test_speeds_are_those_of_the_step():
    own = estimator(Cluster(num_nodes=2, ranks_per_node=2, links=LINKS, device=DEVICE)).estimate(config(), exposed=True)
    assert own.seconds is not None
    assert own.tokens == 32 * 128
    assert own.tokens_per_second == pytest.approx(own.tokens / own.seconds)
    model = config().model
    flops = model_flops_per_token(model, padded_vocab_size=model.padded_vocab_size(2048, 1), seq_length=128)
    assert own.teraflops == pytest.approx(flops * own.tokens_per_second / 4 * 1e-12)
    assert 0 < own.exposed["shard"] <= own.seconds


def test_the_model_is_traced_once_for_all_schemes():
    trace_model.cache_clear()
    made = estimator(Cluster(num_nodes=2, ranks_per_node=2))
    for run in schemes(config("--zeropp")).values():
        made.estimate(run)
    assert trace_model.cache_info().misses == 1


def test_schemes_differ_from_the_run_in_nothing_but_how_it_shards_and_sends():
    run = config("--zeropp", "--zero-gradient-bits", "8", "8")
    found = schemes(run)
    assert list(found) == ["ZeRO-3", "HSDP", "qwZ", "hpZ", "qgZ", "--zeropp", "--zeropp, lossless"]
    assert found["--zeropp"] == run
    assert len({(other.zero, other.parallel) for other in found.values()}) == 7
    lossless = [name for name, other in found.items() if other.zero.zero_weight_delta == "lossless"]
    assert lossless == ["--zeropp, lossless"]
    assert lossless[0] not in schemes(changed(run, precision={"bf16": False}))
    for other in found.values():
        assert (other.model, other.batches, other.precision) == (run.model, run.batches, run.precision)
        assert other.zero.zero_gradient_bits == (8, 8)


def test_the_size_of_lossless_differences_follows_the_learning_rate_between_measured_ones():
    assert lossless_share(1e-5) == LOSSLESS_SHARES[1e-5]
    assert LOSSLESS_SHARES[1e-5] < lossless_share(3e-5) < LOSSLESS_SHARES[1e-4]
    assert (lossless_share(1e-9), lossless_share(1.0)) == (LOSSLESS_SHARES[1e-6], LOSSLESS_SHARES[3e-3])


EVERY = ["--diloco-steps", "4", "--global-batch-size", "32", "--micro-batch-size", "4"]


def test_bytes_between_islands_are_those_of_4_bits_twice_and_means_over_steps():
    run, cluster = config(*EVERY, "--diloco-islands", "2"), Cluster(num_nodes=4, ranks_per_node=2)
    own = estimator(cluster).estimate(run)
    parameters = own.memory[Memory.PARAMETERS] / 4 * 4  # of four ranks of an island
    per_node = 2 * (0.5 + 2 / 128) * parameters * (2 - 1) / 2 / 2  # two hops; two islands, of two nodes each
    assert own.node_island_bytes == pytest.approx(per_node, rel=0.05)  # 1-D parameters travel exact
    alone = estimator(cluster).estimate(changed(run, islands={"diloco_steps": 8}))
    assert alone.node_island_bytes == own.node_island_bytes
    each_step = own.node_cross_bytes - own.node_island_bytes / 4  # the ring of an island's two nodes
    assert each_step == pytest.approx(alone.node_cross_bytes - own.node_island_bytes / 8)
    assert each_step > 0
    assert own.wires["cross"] * 2 >= own.node_island_bytes / 4


def test_a_synchronization_holds_steps_up_unless_it_hides_under_its_delay():
    def timed(*flags: str) -> Estimate:
        links = Links(domain=Link(100.0), network=Link(0.01))
        cluster = Cluster(num_nodes=2, ranks_per_node=2, links=links, device=DEVICE)
        return estimator(cluster).estimate(config(*EVERY, *flags), exposed=True)

    plain, late, parts = timed(), timed("--diloco-delay", "2"), timed("--diloco-delay", "2", "--diloco-fragments", "2")
    assert plain.seconds is not None
    assert plain.exposed["island"] == pytest.approx(plain.held_up / 4, rel=0.01)
    assert plain.busy["island"] == pytest.approx(late.busy["island"])
    step = plain.seconds - plain.held_up / 4
    assert late.held_up == pytest.approx(plain.held_up - 2 * step, rel=0.01)
    assert parts.held_up == pytest.approx(plain.held_up - 4 * step, rel=0.01)  # each of two fragments has two steps
    assert plain.sufficient_gigabits * 0.05 * 4 == pytest.approx(late.sufficient_gigabits * 2, rel=0.01)
    assert late.sufficient_gigabits == pytest.approx(2 * parts.sufficient_gigabits, rel=0.01)
    without = estimator(Cluster(num_nodes=2, ranks_per_node=2)).estimate(config(*EVERY))
    assert without.seconds is None
    assert without.node_island_bytes == plain.node_island_bytes


def test_local_steps_are_planned_beside_the_schemes_which_have_none():
    pairs, alone = Cluster(num_nodes=4, ranks_per_node=2), Cluster(num_nodes=1, ranks_per_node=4)
    flags = ["--diloco-steps", "8", "--diloco-delay", "3", "--diloco-islands", "2"]
    assert local_steps(config(*flags), alone) == {}
    ((name, usual),) = local_steps(config("--zeropp"), pairs).items()
    assert (name, usual.islands.diloco_steps, usual.zero.zeropp) == ("--diloco-steps 30", 30, False)
    ((name, own),) = local_steps(config(*flags, "--zeropp"), pairs).items()
    assert (name, own) == ("--diloco-steps 8", config(*flags, "--zeropp"))
    assert not local_steps(config(*flags), pairs)[name].zero.zeropp
    for other in schemes(own).values():
        assert other.islands.diloco_steps is None


def test_documents_are_planned_as_the_device_will_keep_them_apart():
    v100, h100 = (DEVICE._replace(name=name) for name in ("V100-SXM3-32GB", "H100-SXM5-80GB"))
    mask = 128 * 128 * 2 * 2  # of two layers, in bf16
    for device, dropout, masked in ((h100, "0", False), (h100, "0.1", True), (v100, "0", True), (None, "0", True)):
        made = estimator(Cluster(num_nodes=2, ranks_per_node=2, device=device))
        flags = ["--attention-dropout", dropout, "--micro-batch-size", "1"]
        plain, own = (made.estimate(config(*flags, *more)) for more in ([], ["--reset-attention-mask"]))
        extra = own.memory.total() - plain.memory.total()
        assert extra >= mask if masked else extra == 0, (device, dropout)
