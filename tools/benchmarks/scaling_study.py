"""The scaling study of configs/clusters/README.md: three clusters, 64 to 16,384 GPUs, fixed tokens per GPU.

    python tools/benchmarks/scaling_study.py --out scaling/     scaling.md and, with matplotlib, scaling.svg: minutes

For each scheme model TFLOP/s per GPU; beside them what the planner takes of all schemes, of 1 and more copies of the
model and of tensor parallelism inside a node. Nothing is started. For one's own model and cluster: tools/plan.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megazpp.arguments import parse_run_config
from megazpp.planner.scaling import Scaled, Scaling, scaling_table
from megazpp.planner.search import COMPARED
from megazpp.planner.variants import for_planning
from megazpp.program import can_draw, flags_of, program
from megazpp.topology.cluster_file import read_cluster

ROOT = Path(__file__).resolve().parents[2]
SIZES = (64, 256, 1024, 4096, 16384)


class Study(NamedTuple):
    """One model on one cluster.

    Attributes:
        title: for the table and the plot.
        cluster: of configs/clusters.
        flags: pretrain_gpt.py's; one micro-batch per optimizer step.
    """

    title: str
    cluster: str
    flags: str


TP_1 = "--tensor-model-parallel-size 1 --no-sequence-parallel --global-batch-size 16384"
STUDIES = (
    Study(
        "18B on DGX-2, 1 x 100 Gbit/s a node, 1024 tokens per GPU",
        "dgx2_v100_1x100gbit",
        f"@configs/gpt_18b.args {TP_1} --micro-batch-size 1 --no-bf16 --fp16 --seq-length 1024 "
        "--recompute-granularity full --recompute-method uniform",
    ),
    Study(
        "18B on DGX H100, 8 x 400 Gbit/s a node, 4096 tokens per GPU",
        "dgx_h100",
        f"@configs/gpt_18b.args {TP_1} --micro-batch-size 2 --recompute-granularity selective",
    ),
    Study(
        "1.3B on RTX 4090, 10 Gbit/s each, 8192 tokens per GPU",
        "consumer_8x_10gbit",
        f"@configs/gpt_1b3.args {TP_1} --micro-batch-size 4 --recompute-granularity selective",
    ),
)


class StudyResult(NamedTuple):
    """What came of a study; `choices` one per size."""

    study: Study
    points: list[Scaled]
    choices: list[Scaled | None]


@program
def main(argv: list[str]) -> None:
    parser = flags_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for scaling.md and scaling.svg")
    out = parser.parse_args(argv).out
    drawn = can_draw(str(out / "scaling.svg"))
    out.mkdir(parents=True, exist_ok=True)
    results = [run(study, SIZES) for study in STUDIES]
    text = "\n\n".join(f"{found.study.title}\n\n{scaling_table(found.points, found.choices)}" for found in results)
    (out / "scaling.md").write_text(text + "\n")
    print(text)
    if drawn:
        draw(results, out / "scaling.svg")


def run(study: Study, sizes: Sequence[int]) -> StudyResult:
    """All schemes at all sizes, and the planner's choice at each."""
    path = ROOT / f"configs/clusters/{study.cluster}.yaml"
    config = parse_run_config([*study.flags.split(), "--cluster-file", str(path)], ROOT, program="study").config
    cluster = read_cluster(path)
    scaling = Scaling(for_planning(config, "study"), cluster, micro_batches=1, device_type="cpu")
    nodes = [size // cluster.ranks_per_node for size in sizes]
    return StudyResult(study, list(scaling.points(nodes, COMPARED)), [scaling.choice(count) for count in nodes])


def draw(results: Sequence[StudyResult], path: Path) -> None:
    """A panel for each study: TFLOP/s per GPU over GPUs; hollow where memory is too small."""
    import matplotlib  # optional
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4 * len(results), 3.8), layout="constrained")
    for axes, found in zip(figure.subplots(1, len(results), squeeze=False)[0], results, strict=True):
        chosen = [choice for choice in found.choices if choice is not None]
        axes.plot([c.gpus for c in chosen], [c.teraflops for c in chosen], "k:", linewidth=5, alpha=0.3, label="chosen")
        for scheme in COMPARED:
            line = [point for point in found.points if point.scheme == scheme]
            (drawn,) = axes.plot([p.gpus for p in line], [p.teraflops for p in line], label=scheme)
            for fits, fill in ((True, drawn.get_color()), (False, "white")):
                some = [p for p in line if p.fits == fits]
                style = {"color": drawn.get_color(), "markerfacecolor": fill, "marker": "o", "linestyle": ""}
                axes.plot([p.gpus for p in some], [p.teraflops for p in some], **style)
        axes.set_xscale("log", base=4)
        sizes = sorted({point.gpus for point in found.points})
        axes.set_xticks(sizes, labels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_title(found.study.title.replace(", ", "\n", 1), fontsize=9)
        axes.set_xlabel("GPUs")
        axes.grid(True, alpha=0.3)
    first = figure.axes[0]
    first.set_ylabel("model TFLOP/s per GPU")
    figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # text stays text: a quarter of the size
        figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
