"""Test the search of --plan for the fastest variant of a run.

The fastest candidate that fits into memory comes first.
"""

import pytest
from helpers.small_run import parse
from helpers.tiers import slow

from megazpp.planner.estimate import Estimator
from megazpp.planner.variants import Choice, for_planning, search, with_recompute
from megazpp.topology.cluster import Cluster, Device, Host, Link, Links

SLOW = Links(domain=Link(100.0), network=Link(0.1))


def found(
    flags: str = "",
    *,
    gigabytes: float = 1.0,
    links: Links | None = SLOW,
    nodes: int = 2,
    model: str = "gpt_tiny",
    host: Host | None = None,
) -> dict[str, Choice]:
    """Search variants of a run without --compile on nodes of two ranks.

    Return the candidates by their flags, in the order of the search.
    """
    config = parse(f"@configs/{model}.args --bf16 --no-compile {flags}").config
    device = Device("a GPU", teraflops=10.0, gigabytes=gigabytes, gigabytes_per_second=100.0)
    cluster = Cluster(num_nodes=nodes, ranks_per_node=2, links=links, device=device, host=host)
    return {choice.flags: choice for choice in search(Estimator(cluster, device_type="cpu"), config)}


def words(choices: dict[str, Choice], *names: str) -> set[tuple[bool, ...]]:
    """Return a set with one tuple per candidate, which says for each flag of `names` whether the candidate has it."""
    return {tuple(name in flags.split() for name in names) for flags in choices}


def test_search_sorts_fitting_candidates_by_speed_before_the_rest():
    choices = found()
    assert words(choices, "--hsdp", "--zeropp", "--sequence-parallel") == {
        (scheme == "HSDP", scheme == "ZeRO++", tp) for scheme in ("ZeRO-3", "HSDP", "ZeRO++") for tp in (False, True)
    }
    fits = [choice.fits for choice in choices.values()]
    assert fits == sorted(fits, reverse=True)
    speeds = [choice.speed for choice in choices.values() if choice.fits]
    assert speeds == sorted(speeds, reverse=True)
    best = next(iter(choices.values()))
    assert best.flags.startswith("--zeropp ")
    assert best.estimate.plan.layout.local == 2
    assert not any("diloco" in flags for flags in choices)


@pytest.mark.parametrize("given", ["", slow("--zeropp --tensor-model-parallel-size 2 --recompute-granularity full")])
def test_flags_of_a_candidate_after_the_given_ones_are_its_run(given):
    """Parse the given flags and a candidate's flags, and compare with the config that the search has estimated."""
    choices = found(f"--global-batch-size 16 {given}", gigabytes=0.02)
    assert "--recompute-granularity" in " ".join(choices)
    for flags, choice in choices.items():
        if choice.estimate is not None:
            again = parse(f"@configs/gpt_tiny.args --bf16 --no-compile --global-batch-size 16 {given} {flags}").config
            assert again == choice.estimate.config, flags


@pytest.mark.slow
def test_search_tries_states_in_host_memory_only_if_nothing_else_fits():
    host = Host(gigabytes=1.0, gigabytes_per_second=10.0)
    assert not any("offload" in flags for flags in found(host=host))
    without, choices = (
        found("--micro-batch-size 1", gigabytes=0.00548),
        found("--micro-batch-size 1", gigabytes=0.00548, host=host),
    )
    assert not any(choice.fits for choice in without.values())
    assert not any("offload" in flags for flags in without)
    fitting = [flags for flags, choice in choices.items() if choice.fits]
    assert fitting
    assert all("--optimizer-cpu-offload" in flags for flags in fitting)
    assert any("--zero-offload-partial-sums" in flags for flags in choices)
    too_small = found("--micro-batch-size 1", gigabytes=0.00548, host=host._replace(gigabytes=0.001))
    assert not any(choice.fits for choice in too_small.values())


def test_search_keeps_local_steps():
    choices = found("--diloco-steps 4")
    assert words(choices, "--zeropp", "--hsdp", "--sequence-parallel") == {(False, False, False), (False, False, True)}
    assert all(choice.estimate.node_replica_group_bytes > 0 for choice in choices.values())


def test_search_tries_expert_parallel_sizes_of_models_with_experts():
    def sizes(flags: str = "", model: str = "moe_tiny") -> set[tuple[int, int]]:
        choices = found(f"--global-batch-size 4 --num-layers 1 {flags}", model=model).values()
        return {(c.estimate.plan.layout.tp, c.estimate.plan.layout.ep) for c in choices if c.estimate is not None}

    assert sizes() == {(tp, ep) for tp in (1, 2) for ep in (1, 2)}
    assert {ep for _, ep in sizes("--diloco-steps 4")} == {1}
    assert {ep for _, ep in sizes(model="gpt_tiny")} == {1}


@pytest.mark.slow
def test_search_tries_zeropp_but_not_hsdp_inside_wide_replica_groups():
    choices = found("--diloco-steps 4 --diloco-replica-groups 2", nodes=4)
    assert words(choices, "--zeropp", "--hsdp") == {(False, False), (True, False)}
    assert next(iter(choices)).startswith("--zeropp")


def test_search_uses_nearest_batch_and_names_impossible_flags():
    choices = found("--global-batch-size 18 --num-attention-heads 1")
    sizes = {
        (choice.estimate.config.batches.micro_batch_size, choice.estimate.config.batches.global_batch_size)
        for choice in choices.values()
        if choice.estimate is not None
    }
    # micro-batches of 8 samples on 4 ranks would need 32 samples per step, but the run has 16
    assert sizes == {(1, 16), (2, 16), (4, 16)}
    problems = [choice.problem for flags, choice in choices.items() if "--tensor-model-parallel-size 2" in flags]
    assert problems
    assert all("--num-attention-heads 1" in problem for problem in problems)


@pytest.mark.slow
def test_search_tries_more_recomputation_until_it_fits_and_never_less():
    def tried(gigabytes: float) -> list[tuple[int, str | None, bool]]:
        choices = found("--global-batch-size 256 --micro-batch-size 1", gigabytes=gigabytes).values()
        runs = [(choice.estimate.config, choice.fits) for choice in choices if choice.estimate is not None]
        return [
            (run.batches.micro_batch_size, run.model.recompute, fits)
            for run, fits in runs
            if not run.zero.zeropp and not run.parallel.hsdp and run.parallel.tensor_model_parallel_size == 1
        ]

    roomy = tried(100.0)
    assert {(size, recompute) for size, recompute, _ in roomy} == {(size, None) for size in (1, 2, 4, 8, 16)}
    config = parse("@configs/gpt_tiny.args --bf16 --global-batch-size 256 --micro-batch-size 2").config
    needs = Estimator(Cluster(num_nodes=2, ranks_per_node=2), device_type="cpu").estimate(config).gigabytes
    narrow = set(tried(needs * 1.01 / 0.9))
    assert (2, None, True) in narrow
    assert (4, None, False) in narrow
    assert {recompute for size, recompute, _ in narrow if size > 4} <= {"selective", "full"}


def test_search_without_links_reports_fitting_without_speeds():
    assert all(choice.fits and not choice.speed for choice in found(links=None).values() if choice.estimate)


def test_with_recompute_drops_the_method_without_recomputation():
    flags = "--recompute-granularity full --recompute-method block --recompute-num-layers 1"
    full = parse(f"@configs/gpt_tiny.args {flags}").config
    assert with_recompute(full, None).model.recompute_method is None
    assert with_recompute(full, "full") == full


@pytest.mark.parametrize(
    "flags", ["--model-vocab-size 1000", "--model-vocab-size 1000 --vocab-size 500", "--vocab-size 1000"]
)
def test_estimates_have_the_vocabulary_of_the_model(flags):
    config = parse(f"--num-layers 1 --hidden-size 16 --num-attention-heads 1 --data-path a {flags}").config
    assert for_planning(config, "--plan").tokenizer.vocab_size == 1000
