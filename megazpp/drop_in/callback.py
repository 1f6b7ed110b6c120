"""`megazpp.trainer_callback`: ZeRO++ in the Trainer of transformers or TRL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from megazpp.drop_in.api import zeropp
from megazpp.drop_in.handle import Handle


class trainer_callback:  # noqa: N801, because it is called like a function
    """A callback for the Trainer of transformers or TRL that calls `zeropp` when training begins.

    After training has begun, the callback's attribute `sharding` is the handle that `zeropp` has returned. The callback
    saves the state of ZeRO++ (`Handle.save`) in the Trainer's checkpoints. It loads this state when the Trainer resumes
    from a checkpoint in `output_dir`.

    `trainer_callback` is a class, because the Trainer calls a class in `callbacks` to make the callback. So
    `callbacks=` also accepts `trainer_callback` without parentheses. The keyword arguments are passed to `zeropp`.
    """

    def __new__(cls, **arguments: Any) -> Any:
        """Return the callback, an instance of a class that derives from transformers' `TrainerCallback`."""
        return _make_callback(arguments)


def _make_callback(arguments: Mapping[str, Any]) -> Any:
    """Return a callback for the Trainer of transformers that calls `zeropp` with `arguments` as keyword arguments."""
    # transformers is an optional dependency, so only this function imports it
    from transformers import TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    class Zeropp(TrainerCallback):
        """The callback that installs ZeRO++ in the model that the Trainer has wrapped with FSDP2."""

        sharding: Handle | None = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Install ZeRO++ in the wrapped model; the Trainer calls this before the first step.

            If the Trainer resumes from a checkpoint, the state of ZeRO++ is loaded from there as well.

            Raises:
                TypeError: the model is not wrapped with FSDP2.
            """
            model: nn.Module = given["model"]
            if not isinstance(model, FSDPModule):
                raise TypeError(
                    f"the Trainer trains a {type(model).__name__}, but ZeRO++ requires FSDP2: pass TrainingArguments "
                    'fsdp=True and fsdp_config={"version": 2}. On CPUs, accelerate uses DDP and ignores these arguments'
                )
            self.sharding = zeropp(model, **arguments)
            if state.global_step > 0:
                self.sharding.load(self._folder(args, state))

        def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            """Add the state of ZeRO++ to the checkpoint that the Trainer has just written; the Trainer calls this."""
            if self.sharding is not None and not args.save_only_model:
                self.sharding.save(self._folder(args, state))

        def _folder(self, args: Any, state: Any) -> Path:
            """Return the folder in which the Trainer stores its checkpoint of the step `state.global_step`."""
            return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    return Zeropp()
