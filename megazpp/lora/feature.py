"""Registration of LoRA as an optional feature, with which programs can load checkpoints that have only adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megazpp.base.flags import flag
from megazpp.run.arguments import FeatureConfig
from megazpp.run.feature import Feature

if TYPE_CHECKING:
    from megazpp.lora.weights import AdapterOpener


@dataclass(frozen=True, kw_only=True)
class AdapterBaseConfig(FeatureConfig):
    """Checkpoints of LoRA.

    Flag for loading checkpoints of LoRA runs, which contain only adapters: where the base weights are.

    Attributes:
        lora_base: folders of checkpoints with the base weights of the LoRA adapters that are loaded, if they were
            moved.
    """

    lora_base: tuple[str, ...] = flag((), nargs="*", per_host=True, must_exist=True)


class Lora(Feature):
    """LoRA: programs can open a checkpoint of a LoRA run as complete weights, with its adapters merged in.

    The flags that train adapters belong to post-training.
    """

    config, opens_weights = AdapterBaseConfig, True

    def weight_opener(self, sections: Sequence[Any]) -> AdapterOpener:
        """Return an opener of checkpoints, also of checkpoints that contain only adapters.

        The opener looks for the adapters' base weights in the folders of --lora-base, then in the folder that the
        checkpoint names. `sections` has the configs of the program's features, among them the value of --lora-base.
        """
        return adapter_opener(sections)


def adapter_opener(sections: Sequence[Any]) -> AdapterOpener:
    """Return an opener of checkpoints, which merges adapters into their base weights if a checkpoint has only adapters.

    Args:
        sections: configs of the program's features. In a program with the flag --lora-base, one of the configs has the
            value of this flag: the folders in which the opener looks first for the base of a checkpoint.
    """
    from megazpp.lora.weights import AdapterOpener

    given = next((section for section in sections if isinstance(section, AdapterBaseConfig)), AdapterBaseConfig())
    return AdapterOpener(given.lora_base)


FEATURE = Lora()
