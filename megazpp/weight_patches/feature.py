"""The optional feature that writes weight patches: files with the 16-bit weights that each training step changes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megazpp.run.arguments import RunConfig
from megazpp.run.feature import Attached, Feature
from megazpp.weight_patches.config import PatchesConfig

if TYPE_CHECKING:
    from megazpp.run.checks import RunPlan
    from megazpp.run.trainer import Trainer


class WeightPatchesFeature(Feature):
    """The feature that writes the weights changed by each training step to the folder --save-weight-patches."""

    config = PatchesConfig

    def check(self, config: RunConfig, plan: RunPlan) -> None:
        """Raise ValueError if --save-weight-patches is given for a run whose weights cannot be written as patches."""
        flags = config.section(PatchesConfig)
        if flags.save_weight_patches is None:
            return
        from megazpp.weight_patches.patches import check_patches

        if plan.layout.replica_group > 1 or config.jobs > 1:
            raise ValueError(
                "--save-weight-patches cannot be combined with --diloco-steps, because replica groups have different "
                "weights: leave out one of them"
            )
        if config.zero.optimizer_cpu_offload:
            raise ValueError("--optimizer-cpu-offload does not support --save-weight-patches: leave one of them out")
        check_patches(config.model, config.precision, plan.wire)

    def attach(self, trainer: Trainer) -> Attached:
        """Return an `Attached` with the action that writes weight patches after each training step.

        Without --save-weight-patches, the `Attached` has no actions.
        """
        config, dims = trainer.run.config, trainer.run.context.dims
        flags = config.section(PatchesConfig)
        if flags.save_weight_patches is None:
            return Attached()
        from megazpp.parallel.agreement import raise_on_all_ranks
        from megazpp.training.loop import AfterStep
        from megazpp.weight_patches.patches import WeightPatches, check_shared, take_patches_folder

        take = functools.partial(take_patches_folder, flags.save_weight_patches, dims.world.rank)
        folder, lock = raise_on_all_ranks(dims.world, take)
        check_shared(folder, dims.world)
        dtype, interval = config.precision.param_dtype, flags.weight_anchor_interval
        parts = trainer.parts
        patches = WeightPatches(folder, interval, *parts.built, dims, dtype=dtype, tokenizer=parts.tokenizer, lock=lock)
        return Attached(after_step=(AfterStep(patches.write, interval=1),))


FEATURE = WeightPatchesFeature()
