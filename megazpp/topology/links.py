"""How fast the wires of a cluster are: figures from a cluster file, a table of parts or a measurement."""

from __future__ import annotations

from typing import Literal, NamedTuple

LinkKind = Literal["domain", "node", "network"]
LINK_KINDS: tuple[LinkKind, ...] = ("domain", "node", "network")  # fastest first


MEASURED = "measured"  # how the source of a measured figure begins


class Link(NamedTuple):
    """One kind of wire.

    Attributes:
        gigabytes_per_second: in one direction (1e9 bytes); for "domain" and "node" what one rank can send, for
            "network" what one node can send with all its adapters together.
        microseconds: from sending a small message to its arrival; None where nobody knows.
        source: where the figures come from.
    """

    gigabytes_per_second: float
    microseconds: float | None = None
    source: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether the rate is what programs reach, and not what a data sheet promises."""
        return self.source.startswith(MEASURED)

    def __str__(self) -> str:
        text = f"{self.gigabytes_per_second:.4g} GB/s"
        return text if self.microseconds is None else f"{text}, {self.microseconds:.4g} us"


class Links(NamedTuple):
    """The wires of a cluster, by what they connect; None where nothing is known.

    Attributes:
        domain: between ranks of one fast domain (NVLink, NVSwitch).
        node: between domains of one node (PCIe, shared memory).
        network: between nodes.
    """

    domain: Link | None = None
    node: Link | None = None
    network: Link | None = None

    def get(self, kind: LinkKind) -> Link | None:
        return self[LINK_KINDS.index(kind)]

    def describe(self) -> str:
        """One line for the log: each figure with its source."""
        known = [(kind, link) for kind in LINK_KINDS if (link := self.get(kind)) is not None]
        return "links: " + (
            "; ".join(f"{kind} {link} ({link.source or 'no source given'})" for kind, link in known) or "none known"
        )
