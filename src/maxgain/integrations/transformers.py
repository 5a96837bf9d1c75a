"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtraError
from .callback import GainCallback

try:
    import accelerate  # noqa: F401 - Trainer needs it, and would say so only when it is used
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "MaxGainCallback needs transformers and accelerate: pip install 'maxgain[transformers]'."
    ) from error


class MaxGainCallback(GainCallback, TrainerCallback):
    """Watches and bounds the gains of a model in training: ``MaxGainCallback().add_to(trainer)``.

    Takes the arguments of ``MaxGain`` but the model, and those of ``watch``. ``gain/worst`` and ``gain/median``, or all
    layers with ``log='all'``, are logged with the loss, wherever the trainer reports. Checkpoints hold nothing of it:
    it has no state.
    """

    def add_to(self, trainer: Trainer) -> None:
        """Add the callback in front of those that report.

        With ``Trainer(callbacks=[...])`` it bounds, writes and alarms as well, but comes behind them, so that
        TensorBoard and the like have written a log before the gains are in it.
        """
        trainer.callback_handler.add_callback(self)
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(0, callbacks.pop())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin when the weights are where they are trained, and a checkpoint is loaded."""
        self.begin(kwargs["model"], [kwargs["optimizer"]], is_writing=state.is_world_process_zero)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Handle the step that is over."""
        if self.watching is not None:
            self.watching.log(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the gains to a training step's log."""
        if "loss" in kwargs["logs"]:
            kwargs["logs"] |= self.numbers()
            state.log_history[-1] |= self.numbers()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leave a plain model behind."""
        self.end()
