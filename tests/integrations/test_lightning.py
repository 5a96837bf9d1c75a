"""Lightning's own Trainer, driven with small models on the CPU, against the same training written out as a loop."""

import csv
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from maxgain import MaxGain
from maxgain.errors import AttachError, BoundError, StateError
from maxgain.integrations.callback import Options

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.loggers import CSVLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

from maxgain.integrations.lightning import MaxGainCallback  # noqa: E402

GAMMA = 0.4
BATCHES = 12

pytestmark = pytest.mark.filterwarnings("ignore:.*returned `None`:UserWarning")  # on purpose


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(3)
        super().__init__(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


class Module(pl.LightningModule):
    """Trains, and leaves out the batches that it is told to, before or after the forward pass."""

    def __init__(self, unseen: tuple[int, ...] = (), skipped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.net = Net()
        self.unseen, self.skipped = unseen, skipped

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
        if number in self.unseen:
            return None
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        return None if number in self.skipped else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(4)
    images, labels = torch.randn(8 * BATCHES, 1, 6, 6), torch.randint(3, (8 * BATCHES,))
    return list(zip(images.split(8), labels.split(8), strict=True))


def loader(rows: list[tuple[Tensor, Tensor]] | None = None) -> Any:
    images, labels = (torch.cat(column) for column in zip(*(rows or batches()), strict=True))
    return DataLoader(TensorDataset(images, labels), batch_size=8)


def trainer(folder: Path, callback: Any, **options: Any) -> Any:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    defaults = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": folder, "logger": False}
    return pl.Trainer(callbacks=[callback], **(defaults | quiet | options))


def looped(rows: list[tuple[Tensor, Tensor]], epochs: int = 2, every: int = 1) -> tuple[Net, list[dict[str, float]]]:
    """The same training without a framework."""
    net = Net()
    optimizer = sgd(net)
    constraint = MaxGain(net, GAMMA).attach(optimizer)
    history = []
    for number, (images, labels) in enumerate(rows * epochs):
        (F.cross_entropy(net(images), labels) / every).backward()
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            history.append(constraint.gains)
    return net, history


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("every", [1, 3])
def test_a_callback_trains_as_the_loop_does_with_and_without_accumulation(tmp_path: Path, every: int) -> None:
    module, callback = Module(), MaxGainCallback(gamma=GAMMA)
    trainer(tmp_path, callback, accumulate_grad_batches=every).fit(module, loader())
    expected, history = looped(batches(), every=every)
    assert same(module.net, expected)
    assert callback.constraint is not None
    assert {f"net.{name}": gain for name, gain in history[-1].items()} == callback.constraint.gains
    assert max(max(gains.values()) for gains in history) > GAMMA, "else this test could not fail"


@pytest.mark.parametrize("kind", ["unseen", "skipped"])
def test_a_step_that_returns_none_projects_nothing_and_its_measurements_are_thrown_away(
    tmp_path: Path, kind: str
) -> None:
    rows = batches()
    rows[0] = (100 * rows[0][0], rows[0][1])
    rows[5] = (100 * rows[5][0] + 50, rows[5][1])
    module = Module(**{kind: (0, 5)})
    trainer(tmp_path, MaxGainCallback(gamma=GAMMA), max_epochs=1).fit(module, loader(rows))
    expected, _ = looped([row for number, row in enumerate(rows) if number not in (0, 5)], epochs=1)
    assert same(module.net, expected)


def test_two_callbacks_share_a_module_and_its_checkpoints(tmp_path: Path) -> None:
    def parts() -> list[MaxGainCallback]:
        return [MaxGainCallback(GAMMA, include="net.0"), MaxGainCallback(2 * GAMMA, include="net.3", strength="rate")]

    first, second = parts()
    begun = trainer(tmp_path, first, max_epochs=1)
    begun.callbacks.append(second)
    begun.fit(Module(), loader())
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    saved = torch.load(tmp_path / "begun.ckpt", weights_only=False)["callbacks"]
    for callback in (first, second):
        assert saved[callback.state_key].keys() == callback.state_dict().keys()
    whole, resumed = Module(), Module()
    for module, checkpoint in ((whole, None), (resumed, tmp_path / "begun.ckpt")):
        first, second = parts()
        going_on = trainer(tmp_path, first)
        going_on.callbacks.append(second)
        going_on.fit(module, loader(), ckpt_path=checkpoint)
    assert same(whole, resumed)


def test_a_step_that_the_gradient_scaler_skips_projects_nothing(tmp_path: Path) -> None:
    rows = batches()
    rows[2] = (rows[2][0] * 1e4, rows[2][1])  # overflows in half precision, at the scale that the scaler begins with
    precision = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**12))
    module, callback = Module(), MaxGainCallback(gamma=GAMMA)
    trainer(tmp_path, callback, plugins=[precision], max_epochs=1).fit(module, loader(rows))

    net, scaler, skipped = Net(), torch.amp.GradScaler("cpu", init_scale=2.0**12), 0
    optimizer = sgd(net)
    MaxGain(net, GAMMA).attach(optimizer)
    for images, labels in rows:
        with torch.autocast("cpu", torch.half, cache_enabled=False):
            loss = F.cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        optimizer.zero_grad()
    assert skipped
    assert same(module.net, net)


class Two(pl.LightningModule):
    """Two networks and two optimisers that take turns, as a GAN's do; the third network is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.one, self.other = Net(), Net()

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        optimizer = self.optimizers()[number % 2]
        loss = F.cross_entropy((self.one, self.other)[number % 2](batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [sgd(self.one), sgd(self.other)]


@pytest.mark.parametrize("include", [None, "one.*"])
def test_each_of_several_optimisers_projects_what_it_steps(tmp_path: Path, include: str | None) -> None:
    module = Two()
    callback = MaxGainCallback(gamma=GAMMA, include=include)
    trainer(tmp_path, callback, max_epochs=1).fit(module, loader())
    one, _ = looped(batches()[::2], epochs=1)
    other, _ = looped(batches()[1::2], epochs=1)
    assert same(module.one, one)
    assert same(module.other, other) == (include is None)


class Beginning(MaxGainCallback):
    """Remembers the gains with which a training began."""

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        assert self.constraint is not None
        self.first = self.constraint.gains


def test_a_resumed_training_begins_with_the_saved_state_and_ends_in_the_same_bits(tmp_path: Path) -> None:
    whole, callback = Module(), MaxGainCallback(gamma=GAMMA)
    trainer(tmp_path, callback, max_epochs=3).fit(whole, loader())

    before = Beginning(gamma=GAMMA)
    begun = trainer(tmp_path, before, max_epochs=1)
    begun.fit(Module(), loader())
    begun.save_checkpoint(tmp_path / "begun.ckpt")

    resumed, after = Module(), Beginning(gamma=GAMMA)
    trainer(tmp_path, after, max_epochs=3).fit(resumed, loader(), ckpt_path=tmp_path / "begun.ckpt")
    assert same(whole, resumed)
    assert callback.constraint is not None
    assert before.constraint is not None
    assert after.constraint is not None
    assert after.first == before.constraint.gains
    assert after.constraint.gains == callback.constraint.gains


def test_a_state_of_other_layers_is_refused(tmp_path: Path) -> None:
    begun = trainer(tmp_path, MaxGainCallback(gamma=GAMMA, include="net.0"), max_epochs=1)
    begun.fit(Module(), loader())
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    told = pytest.warns(UserWarning, match="add the following callbacks")  # by Lightning, which would go on
    with told, pytest.raises(StateError, match=r"with MaxGainCallback.*net\.0.*, and this is MaxGainCallback: go on"):
        trainer(tmp_path, MaxGainCallback(gamma=GAMMA)).fit(Module(), loader(), ckpt_path=tmp_path / "begun.ckpt")


def test_gains_go_to_the_trainers_logger_at_its_own_interval(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer(tmp_path, MaxGainCallback(gamma=GAMMA), logger=logger, log_every_n_steps=4).fit(Module(), loader())
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["gain/net.0"]]
    _, history = looped(batches())
    assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19, 23]
    assert [float(row["gain/net.3"]) for row in rows] == [history[int(row["step"])]["3"] for row in rows]


def test_a_module_is_plain_after_training_and_can_be_trained_again(tmp_path: Path) -> None:
    module, callback = Module(), MaxGainCallback(gamma=GAMMA)
    for _ in range(2):
        trainer(tmp_path, callback, max_epochs=1).fit(module, loader())
        assert not any(layer._forward_hooks for layer in module.modules())
    assert callback.constraint is not None
    assert all(gain > 0 for gain in callback.constraint.gains.values())


def test_a_training_that_fails_leaves_a_plain_module(tmp_path: Path) -> None:
    class Failing(Module):
        def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
            if number == 2:
                raise RuntimeError("for the test")
            return super().training_step(batch, number)

    module = Failing()
    with pytest.raises(RuntimeError, match="for the test"):
        trainer(tmp_path, MaxGainCallback(gamma=GAMMA)).fit(module, loader())
    assert not any(layer._forward_hooks for layer in module.modules())


def test_a_mistake_in_an_argument_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"MaxGainCallback\(\) got an unexpected keyword argument 'gama'"):
        MaxGainCallback(gama=2.0)
    with pytest.raises(BoundError, match="gamma must be a positive number"):
        MaxGainCallback(Module())


def test_editors_know_the_arguments_that_the_constraint_has() -> None:
    of_the_constraint = inspect.signature(MaxGain).parameters.keys() - {"model", "gamma"}
    assert Options.__annotations__.keys() == of_the_constraint


def test_optimisers_that_hold_no_constrained_weight_are_refused(tmp_path: Path) -> None:
    class Elsewhere(Module):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD([self.net[0].bias], lr=0.1)

    with pytest.raises(AttachError, match="holds none of the 2 constrained weights"):
        trainer(tmp_path, MaxGainCallback(gamma=GAMMA)).fit(Elsewhere(), loader())
