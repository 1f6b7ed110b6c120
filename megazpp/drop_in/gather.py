"""The all-gathers of models that `megazpp.zeropp` wraps, whose dtypes and order of units the user's program decides."""

from __future__ import annotations

from typing import Any

import torch

from megazpp.drop_in.codec import ByteCodec, segments_in_bytes
from megazpp.drop_in.units import ProgramUnit
from megazpp.parallel.comm_queue import Moment
from megazpp.zero.comms import CommContext
from megazpp.zero.gather import CountedGather, Pending, TwoHopGather
from megazpp.zero.wire import Codec, Segment


class ProgramRingGather(CountedGather):
    """The all-gather of a unit's weights in one hop, in a model of `megazpp.zeropp`.

    Attributes:
        num_uses: number of times that the unit was gathered so far, the same on every rank.
    """

    num_uses = 0

    def __call__(self, *args: Any, **how: Any) -> Pending | None:
        """Gather the unit's weights, and count this use in `num_uses`; see `CountedGather.__call__`."""
        self.num_uses += 1
        return super().__call__(*args, **how)


class ProgramGather(TwoHopGather):
    """The all-gather of a unit's weights in two hops, in a model of `megazpp.zeropp`.

    The unit's parameters may have several dtypes, and the program may cast them later.

    Attributes:
        num_uses: number of times that the unit was gathered so far, the same on every rank.
    """

    num_uses = 0
    unit: ProgramUnit
    # Segments of the unit's parameters in the flat shard that `_codec` packs, in elements, or in bytes for `ByteCodec`
    _segments: tuple[Segment, ...]

    def __init__(self, unit: ProgramUnit, context: CommContext) -> None:
        self._dtypes = unit.gather_dtypes
        super().__init__(unit, context)

    def _new_codec(self) -> Codec:
        """Return a codec for the dtypes in which FSDP2 gathers the unit's parameters now, and record these dtypes."""
        dtypes = self._dtypes = self.unit.gather_dtypes
        self._segments = self.unit.segments
        codec: Codec
        if self.unit.is_quantizable:
            codec = self._context.codec(self._segments, self._plan.fmt, dtypes[0])
        else:
            self._segments = segments_in_bytes(self._segments, dtypes)
            codec = ByteCodec(self._segments)
        if self._plan.differences and codec.dtype.itemsize != 2:
            raise ValueError(
                f'zero_weight_delta="lossless" requires weights in one 16-bit dtype, but those in {self.unit.name} are '
                f"gathered in {', '.join(sorted(map(str, set(dtypes))))}: set MixedPrecisionPolicy(param_dtype="
                'torch.bfloat16), or zero_weight_delta="none"'
            )
        return codec

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Pending | None:
        """Gather the unit's weights. If the program has cast the parameters, first plan the unit's messages again.

        See `TwoHopGather.__call__` for arguments and result.
        """
        if self._dtypes != self.unit.gather_dtypes:  # the program has cast parameters since the last gather
            self.unit.check_dtypes()
            self._plan_messages()
            self.drop()
        if self._codec.dtype == torch.uint8:
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        self.num_uses += 1
        return super().__call__(output_tensor, input_tensor, group, async_op)

    def start_early(self, since: Moment) -> bool:
        """Start the cross-node hop of the unit's weights before its next use, as `TwoHopGather.start_early` does.

        The hop does not start if the program has cast the unit's parameters since the last gather. The buffers for the
        hop then still have the size of the old dtype, until `__call__` plans the messages again.
        """
        return self._dtypes == self.unit.gather_dtypes and super().start_early(since)
