"""A callback for Lightning's Trainer."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Unpack

from torch.optim import Optimizer

from ..coverage import Bound
from ..errors import MissingExtraError, StateError
from .callback import ConstrainingCallback, Options

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise MissingExtraError("MaxGainCallback needs Lightning: pip install 'maxgain[lightning]'.") from error


class MaxGainCallback(ConstrainingCallback, pl.Callback):
    """Constrains the gains of a ``LightningModule``: ``Trainer(callbacks=[MaxGainCallback(gamma=2.0)])``.

    It takes the arguments of ``MaxGain`` but the model. Every optimiser of the module projects what it steps. Gains
    (``gain/<layer>``) and what bounded layers were multiplied by (``scale/<layer>``) go to the trainer's loggers, the
    constraint's state into its checkpoints.
    """

    def __init__(self, gamma: Bound = 2.0, **options: Unpack[Options]) -> None:
        super().__init__(gamma, **options)
        self._saved: dict[str, Any] = {}
        self._skipping = ExitStack()

    @property
    def state_key(self) -> str:
        """By which a checkpoint knows this callback: several may each constrain some layers, or in another norm."""
        chosen = {name: self.options[name] for name in ("include", "exclude", "p") if name in self.options}
        key: str = self._generate_state_key(**chosen) if chosen else super().state_key
        return key

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The strategy has put the weights where they are trained, and checkpoints are loaded."""
        constraint = self.begin(pl_module, trainer.optimizers)
        if self._saved:
            constraint.load_state_dict(self._saved)
            self._saved = {}

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """A ``training_step`` that returns None leaves no gradients; Lightning calls the optimiser all the same."""
        gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
        if (
            self.constraint is not None
            and pl_module.automatic_optimization
            and not any(g is not None for g in gradients)
        ):
            self._skipping.enter_context(self.constraint.paused())
            self._skipping.callback(self.constraint.discard)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        """Logs as Lightning's own monitors do: ``log()`` would want every step's gains, and so wait for the GPU."""
        self._skipping.close()
        if trainer.is_global_zero and trainer.loggers and trainer._logger_connector.should_update_logs:
            for logger in trainer.loggers:
                logger.log_metrics(self.logged(), step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves a plain module behind."""
        self.end()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves a plain module behind."""
        self.end()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuses the state of other layers, which Lightning would leave alone."""
        saved = set(checkpoint.get("callbacks", ()))
        left = sorted(key for key in saved if key.startswith(type(self).__qualname__))
        if self.state_key not in saved and left and not {one.state_key for one in trainer.callbacks} & set(left):
            raise StateError(
                f"the checkpoint was written with {left[0]}, and this is {self.state_key}: go on with the same layers "
                "and the same norm."
            )

    def state_dict(self) -> dict[str, Any]:
        """What Lightning puts into a checkpoint."""
        return dict(self.constraint.state_dict()) if self.constraint is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Lightning calls this before the weights are where they are trained, so the state waits until then."""
        self._saved = state_dict
