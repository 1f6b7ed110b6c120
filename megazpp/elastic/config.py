"""Command-line flags of elastic DiLoCo, and the plan that `Elastic.check` makes from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megazpp.base.address import WILDCARDS, is_loopback, parse_address, parse_host
from megazpp.base.flags import flag, spelling
from megazpp.elastic.rounds import Rules
from megazpp.elastic.wire import read_secret
from megazpp.run.arguments import FeatureConfig


@dataclass(frozen=True, kw_only=True)
class ElasticConfig(FeatureConfig):
    """Elastic DiLoCo.

    Each replica group is a separate job. A group may start, end or fall behind while the other groups continue. A small
    program, tools/coordinate.py, decides which groups take part and assigns training samples to them.
    --diloco-replica-groups gives the nominal number of groups, G: each group trains 1 / G of the global batch.

    Attributes:
        diloco_coordinator: HOST:PORT of tools/coordinate.py; this job is then one of the run's replica groups.
        diloco_group: name of this job's replica group (default: host name of rank 0).
        diloco_secret_file: file with the secret of the run, readable only by its owner (default: none, if the
            coordinator is on 127.0.0.1).
        diloco_quorum: number of groups whose contributions, each of at least 80 % of an interval's steps, must have
            arrived before --diloco-grace begins (default: half of the live groups).
        diloco_grace: seconds that a synchronization waits for more groups once --diloco-quorum groups have contributed
            (default: 3 % of an interval, at least 1).
        diloco_wait_for_all: wait for all live groups at every synchronization, as DiLoCo without --diloco-coordinator
            does; results are then reproducible.
        diloco_min_groups: number of live groups below which these groups wait instead of training on.
        diloco_late_factor: factor by which the weight of a late contribution is multiplied, once for each
            synchronization that it has missed.
        diloco_listen: host on which ranks serve messages to other groups (default: local address of the connection to
            the coordinator).
        diloco_advertise: host at which other groups reach this one (default: --diloco-listen; if that is 0.0.0.0 or ::,
            the local address of the connection to the coordinator).
    """

    diloco_coordinator: str | None = flag(None, metavar="HOST:PORT")
    diloco_group: str | None = flag(None, needs="--diloco-coordinator")
    diloco_secret_file: str | None = flag(None, needs="--diloco-coordinator", must_exist=True)
    diloco_quorum: int | None = flag(None, needs="--diloco-coordinator", must_be="positive")
    diloco_grace: float | None = flag(None, needs="--diloco-coordinator", must_be="not negative")
    diloco_wait_for_all: bool = flag(False, needs="--diloco-coordinator")
    diloco_min_groups: int = flag(1, needs="--diloco-coordinator", must_be="positive")
    diloco_late_factor: float = flag(
        0.5, needs="--diloco-coordinator", must_be="not negative", most=(1, "with which late contributions count fully")
    )
    diloco_listen: str | None = flag(None, needs="--diloco-coordinator")
    diloco_advertise: str | None = flag(None, needs="--diloco-coordinator")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.diloco_wait_for_all and self.diloco_grace is not None:
            raise ValueError(
                f"--diloco-wait-for-all waits without a limit, and --diloco-grace {self.diloco_grace:g} is a limit in "
                "seconds: give only one"
            )
        for name in ("diloco_listen", "diloco_advertise"):
            self.host(name)  # raises a ValueError if the flag gives no valid host
        if self.host("diloco_advertise") in WILDCARDS:
            raise ValueError(
                f"--diloco-advertise {self.diloco_advertise}: other groups cannot connect to this address; give the "
                "address at which they reach this group"
            )
        if self.diloco_coordinator is None:
            return
        host, _ = parse_address(self.diloco_coordinator, "--diloco-coordinator")
        reachable = {
            f"--diloco-coordinator {self.diloco_coordinator} is not on this machine": host,
            f"--diloco-listen {self.diloco_listen} lets other machines connect": self.host("diloco_listen"),
        }
        for reason, address in reachable.items():
            if self.diloco_secret_file is None and address is not None and not is_loopback(address):
                raise ValueError(
                    f"{reason}, and needs --diloco-secret-file: give the file with the secret with which "
                    "tools/coordinate.py was started"
                )

    def host(self, name: str) -> str | None:
        """Return the host that the flag of the field `name` gives, without the brackets of an IPv6 address.

        None if the flag is not given.
        """
        value = getattr(self, name)
        return None if value is None else parse_host(value, spelling(self, name))

    @property
    def secret(self) -> bytes:
        """The secret of the run, which all of its groups and the coordinator share, read from its file."""
        return read_secret(self.diloco_secret_file, "--diloco-secret-file")


class ElasticPlan(NamedTuple):
    """The plan of elastic DiLoCo for a run, derived from the flags before workers start."""

    rules: Rules  # the settings that all groups of the run have in common
    notices: tuple[str, ...] = ()  # lines to show the user when the run starts; elastic DiLoCo has none

    def describe(self) -> str:
        """Return a log line: the nominal number of groups, and how long a synchronization waits for slow groups."""
        rules = self.rules
        grace = "3 % of an interval" if rules.grace is None else f"{rules.grace:g} s"
        quorum = "half of the live groups" if rules.quorum is None else f"{rules.quorum} groups"
        return (
            f"elastic: this job is one of nominally {rules.groups} groups; after {quorum} have arrived, a "
            f"synchronization waits {grace} for more"
        )
