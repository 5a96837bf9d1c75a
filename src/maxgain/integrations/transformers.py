"""A callback for the Trainer of Hugging Face's transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import nn

from ..coverage import Bound
from ..errors import MissingExtraError
from .callback import ConstrainingCallback, Options

try:
    import accelerate  # noqa: F401 - Trainer needs it, and would say so only when it is used
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise MissingExtraError(
        "MaxGainCallback needs transformers and accelerate: pip install 'maxgain[transformers]'."
    ) from error


class MaxGainCallback(ConstrainingCallback, TrainerCallback, ExportableState):
    """Constrains the gains of a model in training: ``Trainer(..., callbacks=[MaxGainCallback(gamma=2.0)])``.

    It takes the arguments of ``MaxGain`` but the model. Gains (``gain/<layer>``) and what bounded layers were
    multiplied by (``scale/<layer>``) are logged with the loss, to wherever the trainer reports. The constraint's state
    is kept in the checkpoints' ``trainer_state.json``.
    """

    def __init__(self, gamma: Bound = 2.0, **options: Unpack[Options]) -> None:
        super().__init__(gamma, **options)
        self.patterns = list(self.gamma) if isinstance(self.gamma, dict) else []
        """Of a mapping, in their order: the first that matches decides, and the trainer's JSON sorts keys."""
        if not hasattr(Trainer.log, "adds_gains"):
            Trainer.log = _adding_gains(Trainer.log)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        optimizer: Any,
        **kwargs: Any,
    ) -> None:
        """The weights are where they are trained; where a checkpoint was loaded, ``state`` is what it held."""
        if isinstance(self.gamma, dict) and self.gamma.keys() == {*self.patterns}:
            self.gamma = {pattern: self.gamma[pattern] for pattern in self.patterns}
        constraint = self.begin(model, [optimizer])
        # A checkpoint that was written without this callback lacks its row, and the trainer would stumble over that.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step:
            own = constraint.state_dict()
            # Of several callbacks there is a list, to which each checkpoint has added their states.
            rows = list(reversed(saved)) if isinstance(saved, list) else [saved]
            rows = [row for row in rows if row["attributes"]["saved"].keys() == own.keys()] or rows
            alike = [row for row in rows if row["args"] == self.state()["args"]]
            numbers = (alike or rows)[0]["attributes"]["saved"]
            like = {name: own[name].dtype for name in own.keys() & numbers.keys()}
            with torch.device("cpu"):
                loaded = {name: torch.tensor(n, dtype=like.get(name)) for name, n in numbers.items()}
            constraint.load_state_dict(loaded)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Leaves a plain model behind."""
        self.end()

    def state(self) -> dict[str, Any]:
        """What the trainer puts into a checkpoint, in numbers that JSON can hold; a process group is not one."""
        options = {name: value for name, value in self.options.items() if name != "process_group"}
        tensors = self.constraint.state_dict() if self.constraint is not None else {}
        saved = {name: tensor.tolist() for name, tensor in tensors.items()}
        return {"args": {"gamma": self.gamma, **options}, "attributes": {"saved": saved, "patterns": self.patterns}}


def _adding_gains(log: Callable[..., None]) -> Callable[..., None]:
    """A ``Trainer.log`` that adds the gains to a training step's log.

    A callback of one's own hears of a log after those that report it (TensorBoard and the like), which is too late to
    add anything.
    """

    @functools.wraps(log)
    def adding(trainer: Trainer, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, MaxGainCallback):
                    logs |= callback.logged()
        log(trainer, logs, *args, **kwargs)

    adding.adds_gains = True  # type: ignore[attr-defined]
    return adding
