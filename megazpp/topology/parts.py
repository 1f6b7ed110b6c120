"""What known parts can do: bandwidths from data sheets, for clusters that nobody has measured.

Data sheets count both directions of NVLink and PCIe together; a `Link` is one direction, so half. They name no
latencies, so neither does this table. A part that is not in it has no figure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megazpp.topology.cluster import Cluster
from megazpp.topology.hosts import Gpu, HostInfo, node_rates
from megazpp.topology.links import Link, Links

# NVLink of one GPU, both directions, GB/s, by words of its name; the first match counts. PCIe cards have it only with a
# bridge, which the survey sees.
NVLINK_GIGABYTES_PER_SECOND = (
    (r"GB?[BH]?300", 1800.0),  # DGX B300: 14.4 TB/s for 8 GPUs; GB300 NVL72: 130 TB/s for 72
    (r"GB200", 1800.0),  # GB200 NVL72 data sheet: 130 TB/s for 72 GPUs
    (r"B200", 1800.0),  # DGX B200 data sheet: 14.4 TB/s for 8 GPUs
    (r"H200( NVL)?", 900.0),  # H200 data sheet: SXM and, with a 2- or 4-way bridge, NVL
    (r"H100 (PCIe|NVL)", 600.0),  # H100 data sheet, with a bridge
    (r"H100", 900.0),  # H100 data sheet, SXM
    (r"H800", 400.0),  # H800 SXM
    (r"A100", 600.0),  # A100 data sheet: SXM, and PCIe with a bridge
    (r"A800", 400.0),  # A800 data sheet
    (r"A30", 200.0),  # A30 data sheet, with a bridge
    (r"(A40|RTX A6000)", 112.5),  # A40 and RTX A6000 data sheets, with a bridge
    (r"V100-SXM[23]", 300.0),  # V100 data sheet
    (r"P100-SXM2", 160.0),  # P100 data sheet
)

# GT/s per lane and share of the bits that carry data, by generation: PCI Express base specifications 1.0 to 5.0
PCIE = {1: (2.5, 8 / 10), 2: (5.0, 8 / 10), 3: (8.0, 128 / 130), 4: (16.0, 128 / 130), 5: (32.0, 128 / 130)}


def known_links(infos: Sequence[HostInfo], cluster: Cluster) -> Links | None:
    """The links of a surveyed cluster as far as its parts are known; None where nothing is.

    Args:
        infos: what each rank says of its machine; `cluster` is made of them.
    """
    gpus = [info.gpu for info in infos if info.gpu is not None]
    nvlink, pcie = _slowest([_nvlink(gpu) for gpu in gpus]), _slowest([_pcie(gpu) for gpu in gpus])
    joined = bool(gpus) and all(gpu.fabric or gpu.nvlink_peers for gpu in gpus)
    domain = nvlink if joined else pcie
    node = pcie if cluster.domain_size is not None and cluster.domain_size < cluster.ranks_per_node else None
    rate = node_rates(infos) / 8 if cluster.num_nodes > 1 else 0.0
    network = Link(rate, source="the adapters' rates, as the kernel gives them") if rate else None
    return Links(domain, node, network) if domain or node or network else None


def _slowest(links: Sequence[Link | None]) -> Link | None:
    """The slowest of all, or None where one is not known."""
    known = [link for link in links if link is not None]
    return min(known) if known and len(known) == len(links) else None


def _nvlink(gpu: Gpu) -> Link | None:
    rates = (rate for words, rate in NVLINK_GIGABYTES_PER_SECOND if re.search(rf"\b{words}\b", gpu.name))
    rate = next(rates, None)
    return None if rate is None else Link(rate / 2, source=f"data sheet of {gpu.name}")


def _pcie(gpu: Gpu) -> Link | None:
    if gpu.pcie_generation not in PCIE or gpu.pcie_lanes < 1:
        return None
    gigatransfers, share = PCIE[gpu.pcie_generation]
    rate = gigatransfers * share * gpu.pcie_lanes / 8
    return Link(rate, source=f"PCIe {gpu.pcie_generation}.0 x{gpu.pcie_lanes}")
