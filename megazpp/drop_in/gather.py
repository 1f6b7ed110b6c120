"""All-gathers of units whose dtypes and uses the program decides."""

from __future__ import annotations

from typing import Any

import torch

from megazpp.drop_in.codec import MixedCodec
from megazpp.drop_in.units import QUANTIZABLE, ProgramUnit
from megazpp.parallel.comm_queue import Moment
from megazpp.zero.comms import CommContext, CountedGather, Pending
from megazpp.zero.gather import TwoHopGather
from megazpp.zero.wire import Codec


class ProgramRingGather(CountedGather):
    """An all-gather in one hop.

    Attributes:
        num_uses: number of uses so far, the same on every rank.
    """

    num_uses = 0

    def __call__(self, *args: Any, **how: Any) -> Pending | None:
        """Gather the parameters; see `CountedGather.__call__`."""
        self.num_uses += 1
        return super().__call__(*args, **how)


class ProgramGather(TwoHopGather):
    """A two-hop all-gather of a unit whose parameters may have several dtypes, and may be cast later.

    Attributes:
        num_uses: number of uses so far, the same on every rank.
    """

    num_uses = 0
    unit: ProgramUnit

    def __init__(self, unit: ProgramUnit, context: CommContext) -> None:
        self._dtypes = unit.gather_dtypes
        super().__init__(unit, context)

    def _new_codec(self) -> Codec:
        """Make the codec for the dtypes in which FSDP2 gathers the unit now."""
        dtypes = self._dtypes = self.unit.gather_dtypes
        make = self._context.codec
        codec = (
            make(self.unit.segments, self._plan.fmt, dtypes[0])
            if len(set(dtypes)) == 1 and dtypes[0] in QUANTIZABLE
            else MixedCodec(self.unit.segments, dtypes, self._plan.fmt, make)
        )
        if self._plan.differences and codec.dtype.itemsize != 2:
            raise ValueError(
                f"zero_weight_delta lossless needs 16-bit weights, but those in {self.unit.name} are gathered in "
                f"{', '.join(sorted(map(str, set(dtypes))))}"
            )
        return codec

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Pending | None:
        """Gather the unit's parameters; see `TwoHopGather.__call__`."""
        if self._dtypes != self.unit.gather_dtypes:  # the program has cast the parameters
            self.unit.check_dtypes()
            self._plan_messages()
            self.drop()
        if self._codec.dtype == torch.uint8:
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        self.num_uses += 1
        return super().__call__(output_tensor, input_tensor, group, async_op)

    def start_early(self, since: Moment) -> bool:
        """Start the cross-node hop before the next use, unless the program has cast the parameters."""
        return self._dtypes == self.unit.gather_dtypes and super().start_early(since)
