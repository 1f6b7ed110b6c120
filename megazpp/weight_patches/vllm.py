"""Load weight patches into vLLM: the back end `megazpp` of its option `--weight-transfer-config`.

vLLM calls `register` in each of its processes, because pyproject.toml names this function as a plugin
(vllm.general_plugins). Each worker of vLLM reads the patches itself, and loads the weights like a checkpoint. Written
for vLLM 0.33.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megazpp.weight_patches.reader import PatchReader


@dataclass
class PatchFolder(base.WeightTransferInitInfo):
    """The `init_info` that a program gives to vLLM's `init_weight_transfer_engine`.

    Attributes:
        folder: path, on the hosts of vLLM's workers, of the folder that the training run's --save-weight-patches names.
    """

    folder: str


@dataclass
class PatchStep(base.WeightTransferUpdateInfo):
    """The `update_info` that a program gives to vLLM's `update_weights` to make vLLM load newer weights.

    Attributes:
        step: training step whose weights all workers of vLLM load.
    """

    step: int


class PatchTransferEngine(base.WeightTransferEngine[PatchFolder, PatchStep]):
    """The receiving side of vLLM's weight transfer, in each worker of vLLM.

    The methods implement vLLM's interface `WeightTransferEngine`, and vLLM calls them to load newer weights.
    """

    init_info_cls, update_info_cls = PatchFolder, PatchStep
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: PatchFolder) -> None:
        self._reader = PatchReader(init_info.folder)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: PatchStep) -> None:
        self._reader.advance(update_info.step)
        self.model.load_weights(self._reader.weights())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        del self._reader


def register() -> None:
    """Register the back end `megazpp` with vLLM's weight transfer; a second call changes nothing."""
    with suppress(ValueError):  # vLLM raises this error if the back end is already registered
        WeightTransferEngineFactory.register_engine("megazpp", PatchTransferEngine)
