"""Print the environment for an issue report: versions, devices, links, back ends and packages.

    python tools/env.py

The report describes the host on which this program runs. If a launcher starts several ranks, only rank 0 prints. If a
part of the information is not available, the report says why.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parents[1]))  # finds megazpp in a checkout that is not installed

from megazpp.base.program import begin

begin(__name__)  # lets Ctrl-C print one line instead of a traceback, also during the imports below

import torch
from torch.utils import collect_env

import megazpp
from megazpp.base.files import cache_folder
from megazpp.base.memory import host_memory
from megazpp.base.program import aligned, flags_of, launched_rank, program
from megazpp.kernels.block_quant import backend, native
from megazpp.optim.apex import check_apex
from megazpp.optim.build import optimizer_backends
from megazpp.optim.config import OptimizerConfig
from megazpp.parallel.host_discovery import describe_host
from megazpp.parallel.launch import device_type
from megazpp.topology.hosts import cluster_from_hosts

Section = dict[str, str]

PACKAGES = {  # packages that this project uses, and for what
    **dict.fromkeys(("numpy", "sentencepiece", "tqdm", "wandb", "PyYAML", "psutil"), "needed"),
    "triton": "needed for --zeropp on GPUs",
    "nvidia-ml-py": "detects NVLink connections; without it each node counts as one fast domain",
    "torchao": "--fp8-format",
    "transformers": "Hugging Face tokenizers and chat templates",
    "safetensors": "tools/convert_checkpoint.py",
    "pyarrow": "Parquet files",
    "backports.zstd": ".zst files, with Python before 3.14",
    "tensorboard": "--tensorboard-dir",
}

# Names of the environment variables that the report shows, because they affect a run
VARIABLES = re.compile(
    "(OMPI_COMM_WORLD|PMI|MV2_COMM_WORLD|JSM_NAMESPACE|FLUX_JOB|FLUX_TASK|PALS|MPI)_.*|PMIX_RANK|PMIX_NAMESPACE|"
    "(NCCL|GLOO|CUDA|NVIDIA|TRITON|TORCH|PYTORCH|OMP|MKL|SLURM|TORCHELASTIC|MEGAZPP|WANDB)_.*"
    "|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|CC|LD_PRELOAD|XDG_CACHE_HOME|TMPDIR"
)
SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD")  # parts of the names of variables whose values the report hides


def collect() -> dict[str, Section]:
    """Return the report about this host: its sections by title, each a dict of texts by name."""
    parts = {"versions": versions, "devices": devices, "back ends": back_ends, "environment": environment}
    report = dict[str, Section]()
    for name, part in parts.items():
        try:
            report[name] = part()
        except Exception as error:  # the report is most useful on a broken machine, so it must always be complete
            report[name] = {"not available": f"{type(error).__name__}: {error}"}
    return report


@program
def main(argv: list[str]) -> None:
    """Print the report about this host; only rank 0 of several ranks prints."""
    flags_of(__doc__).parse_args(argv)
    if launched_rank() != 0:
        return
    for title, section in collect().items():
        rows = aligned([*section.items()] or [("no variable is set that affects a run",)])
        print("\n".join([title, *(f"  {row}" for row in rows), ""]))


def versions() -> Section:
    """Return the versions in torch's own report, shortened, and the versions of the packages that this project uses."""
    # Without this patch torch's report would run pip, which takes seconds.
    with mock.patch.object(collect_env, "get_pip_packages", return_value=("", "")):
        report = collect_env.get_env_info()._asdict()
    cpu = [line for line in (report.pop("cpu_info") or "").splitlines() if line.startswith(("Model name", "NUMA"))]
    report["cpu"] = "; ".join(" ".join(line.split()) for line in cpu)
    if torch.version.cuda:
        report["nccl_of_torch"] = ".".join(map(str, torch.cuda.nccl.version()))
    dropped = ("pip_packages", "pip_version", "conda_packages")
    kept = {
        name: str(value) for name, value in report.items() if name not in dropped and value not in (None, "", "N/A")
    }
    found = {"megazpp": f"{megazpp.__version__} in {Path(megazpp.__file__).parent}"}
    found |= {name.replace("_", " "): value for name, value in kept.items()}
    for name, use in PACKAGES.items():
        found[name] = _version(name) or f"not installed ({use}: pip install {name})"
    try:
        check_apex("cuda")
        found["apex"] = "NVIDIA's, with FusedAdam"
    except ValueError as error:
        found["apex"] = str(error).removeprefix("--optimizer-backend apex: ").partition(";")[0]
    return found


def devices() -> Section:
    """Return the CPU's usable cores and memory, and each GPU with the NVLinks that a rank on it would detect."""
    gibibytes = host_memory().total / 2**30
    found = {"CPU": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores usable, {gibibytes:.1f} GiB"}
    if not torch.cuda.is_available() and Path("/dev/nvidiactl").exists():
        found["CUDA"] = "torch cannot use the GPU: install a build for its driver, see pytorch.org/get-started"
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]
    infos = [describe_host(index, device, uses_gpu=device.type == "cuda") for index, device in enumerate(places)]
    for index, info in enumerate(infos):
        if (gpu := info.gpu) is not None:
            peers = ", ".join(gpu.nvlink_peers) or "no NVLink known"
            where = f"{gpu.pci or gpu.uuid}, NVLink to {peers}{gpu.fabric and f'; fabric {gpu.fabric}'}"
            found[f"cuda:{index}"] = f"{torch.cuda.get_device_properties(index)}; {where}"
    if torch.cuda.device_count():
        cluster = cluster_from_hosts(infos)
        found["fast domains"] = f"of {cluster.domain_size or cluster.ranks_per_node} GPUs"
    if notices := dict.fromkeys(info.notice for info in infos if info.notice):
        found["note"] = "; ".join(notices)
    return found


def back_ends() -> Section:
    """Return the implementations of optimizers, block quantization and collectives that this machine would use."""
    device = device_type()
    rows = optimizer_backends(OptimizerConfig(), device)
    try:
        rows.append(backend(device))
    except ValueError as error:
        rows.append(("block quantization", "none", str(error)))
    found = {"device": f"{device}, collectives by {'nccl' if device == 'cuda' else 'gloo'}"}
    found |= {piece: f"{implementation} ({why})" for piece, implementation, why in rows}
    library = native.library()
    found["C library"] = (
        f"no: {library.missing} (apt install gcc)" if library.missing else f"compiled by {library.compiler}"
    )
    found["cache"] = str(cache_folder())
    return found


def environment() -> Section:
    """Return the environment variables that affect a run, without the values of possible secrets."""
    names = sorted(name for name in os.environ if VARIABLES.fullmatch(name))
    return {name: "(set, not shown)" if SECRET.search(name) else os.environ[name] for name in names}


def _version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
