"""A callback for Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from ..errors import MissingExtraError
from .callback import GainCallback

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise MissingExtraError("MaxGainCallback needs Lightning: pip install 'maxgain[lightning]'.") from error


class MaxGainCallback(GainCallback, pl.Callback):
    """Watches and bounds the gains of a ``LightningModule``: ``Trainer(callbacks=[MaxGainCallback()])``.

    Takes the arguments of ``MaxGain`` but the model, and those of ``watch``. With ``gamma=2.0`` every optimizer of the
    module projects what it steps. The trainer's loggers get ``gain/worst`` and ``gain/median``, or all layers with
    ``log='all'``. Checkpoints hold nothing of it: it has no state.
    """

    _steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin when the strategy has put the weights where they are trained, and a checkpoint is loaded."""
        self._steps = trainer.global_step
        self.begin(pl_module, trainer.optimizers, is_writing=trainer.is_global_zero)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Handle the step that a batch ended, and log where and as Lightning's own monitors do."""
        if trainer.global_step == self._steps:
            return  # gradients are being accumulated
        self._steps, step = trainer.global_step, trainer.fit_loop.epoch_loop._batches_that_stepped
        if self.watching is not None:
            self.watching.log(step)
        if trainer._logger_connector.should_update_logs:
            numbers = self.numbers()
            for logger in trainer.loggers if trainer.is_global_zero and numbers else ():
                logger.log_metrics(numbers, step=step)

    def on_fit_end(self, *args: Any) -> None:
        """Leave a plain module behind."""
        self.end()

    on_exception = on_fit_end
