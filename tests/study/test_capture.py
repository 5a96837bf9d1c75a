"""The step of a GPU, captured and replayed: it trains as the plain step does, alone or beside others."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from maxgain.study import capture, checkpoint
from maxgain.study.capture import Speed, step_of
from maxgain.study.cli import app as cli
from maxgain.study.comparing import records
from maxgain.study.data.splits import Dataset
from maxgain.study.models import NETWORKS
from maxgain.study.recipes import RECIPES, Recipe
from maxgain.study.training import DivergedError, Training, to_float, train

CPU = torch.device("cpu")
RECIPE = replace(RECIPES["digits"], epochs=2, fold=0, augment=True, learning_rate=0.01)
PLAIN = Speed(graph=False, compile=False)
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
every_kind = pytest.mark.parametrize("regulariser", ["none", "maxgain=0.8+batchnorm", "maxgain=0.8+dropout"])


def trained(recipe: Recipe, dataset: Dataset, speed: Speed) -> Training:
    device = torch.device("cuda")
    with capture.stream_for(device):
        training = Training(recipe, dataset, device)
        for _ in train(training, speed=speed):
            pass
    return training


def everything(training: Training) -> dict[str, Tensor]:
    """All that a training consists of, but for when the host looks at rounding next: it sees no replayed step."""
    of_the_host = (".rounding", ".looks", "rng.cpu")
    return {name: tensor.clone() for name, tensor in training.state().items() if not name.endswith(of_the_host)}


# Whether to compile.


@pytest.mark.parametrize(
    ("steps", "folds", "is_compiled"), [(14_999, 1, False), (15_000, 1, True), (1_499, 10, False), (1_500, 10, True)]
)
def test_a_network_is_compiled_if_all_folds_together_have_enough_steps(digits, steps, folds, is_compiled) -> None:
    recipe = replace(RECIPE, epochs=steps, batch_size=len(digits.train))
    crossed = [(replace(recipe, cross_validation=folds), 1)] if folds > 1 else []
    for chosen, own_folds in [(recipe, folds), *crossed]:
        training = Training(chosen, replace(digits, folds=own_folds), CPU)
        step_of(training, Speed(graph=False))
        assert (training.forward is not training.model) == is_compiled


@pytest.mark.parametrize(("regulariser", "speed"), [("none", PLAIN), ("gradpenalty", Speed(graph=False))])
def test_a_long_run_is_not_compiled_where_that_is_not_wanted_or_not_possible(digits, regulariser, speed) -> None:
    training = Training(replace(RECIPE, epochs=100_000, regulariser=regulariser), digits, CPU)
    step_of(training, speed)
    assert training.forward is training.model


# What is captured.


@pytest.mark.parametrize(("network", "is_captured"), [("mlp", True), ("mine", False)])
def test_a_network_of_ones_own_is_trained_as_it_is(digits, monkeypatch, network, is_captured) -> None:
    asked: list[Training] = []

    def step_of(training: Training, speed: Speed) -> Callable[[], None]:
        asked.append(training)
        return training.step

    monkeypatch.setattr(capture, "step_of", step_of)
    monkeypatch.setitem(NETWORKS, "mine", NETWORKS["mlp"])
    training = Training(replace(RECIPE, network=network), digits, CPU)
    training.device = torch.device("cuda")
    next(train(training))
    assert bool(asked) == is_captured


class Stream:
    """A stand-in for one of torch's, which are made in turn and may be handed out again."""

    made: ClassVar[list["Stream"]] = []

    def __init__(self) -> None:
        self.made.append(self)

    def synchronize(self) -> None:
        """Nothing is waiting."""


@pytest.fixture
def stand_in_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "made", [])
    monkeypatch.setattr(capture, "_idle", defaultdict(list))
    return torch.device("cuda")


def test_a_stream_is_never_that_of_another_run_that_is_under_way(stand_in_gpu: torch.device) -> None:
    with capture.stream_for(stand_in_gpu):
        for _ in range(40):
            with suppress(DivergedError), capture.stream_for(stand_in_gpu):
                raise DivergedError
    assert len(Stream.made) == 2


def test_what_is_left_of_an_earlier_run_is_gone_before_another_begins(stand_in_gpu: torch.device) -> None:
    class Left:
        def __init__(self) -> None:
            self.itself = self

    left = weakref.ref(Left())
    with capture.stream_for(stand_in_gpu):
        assert left() is None


@on_gpu
@every_kind
def test_captured_steps_train_as_plain_ones_do(digits: Dataset, regulariser: str) -> None:
    recipe = replace(RECIPE, regulariser=regulariser)
    plain, captured = (everything(trained(recipe, digits, speed)) for speed in (PLAIN, Speed(compile=False)))
    assert plain.keys() == captured.keys()
    for name in plain:
        torch.testing.assert_close(captured[name], plain[name], rtol=1e-4, atol=1e-6, equal_nan=True, msg=name)


@on_gpu
@every_kind
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by torch's own compiler
def test_compiled_and_captured_steps_train_as_plain_ones_do_but_for_rounding(digits, regulariser, monkeypatch) -> None:
    monkeypatch.setattr(capture, "STEPS_WORTH_COMPILING", 1)
    monkeypatch.setattr("torch._inductor.config.fallback_random", True)  # dropout draws what it draws in a plain step
    recipe = replace(RECIPE, regulariser=regulariser, learning_rate=0.001)
    plain, captured = (trained(recipe, digits, speed) for speed in (PLAIN, Speed()))
    assert captured.forward is not captured.model
    # Not the parameters: the bias of a convolution before batch norm changes nothing, and only rounding moves it.
    untrained, apart = (
        (logits(other, digits) - logits(plain, digits)).norm()
        for other in (Training(recipe, digits, torch.device("cuda")), captured)
    )
    assert apart < 0.1 * untrained


def logits(training: Training, dataset: Dataset) -> Tensor:
    """What the model says of all test images."""
    training.model.eval()
    with torch.no_grad():
        said: Tensor = training.model(to_float(dataset.test.images.cuda()))
    return said


@on_gpu
@every_kind
def test_a_captured_run_that_is_taken_up_within_an_epoch_ends_with_the_same_bits(digits, regulariser, tmp_path) -> None:
    recipe, device = replace(RECIPE, regulariser=regulariser), torch.device("cuda")
    whole = everything(trained(recipe, digits, Speed()))

    def stop_in_time() -> None:
        if next(steps, None) is None:
            raise TimeoutError

    with capture.stream_for(device):
        first = Training(recipe, digits, device)
        steps = iter(range(first.steps_per_epoch + 3))
        with pytest.raises(TimeoutError):
            list(train(first, stop_in_time, Speed()))
        checkpoint.save(tmp_path / "c.safetensors", first, [])
        second = Training(recipe, digits, device)
        checkpoint.load(tmp_path / "c.safetensors", second)
        list(train(second, speed=Speed()))
    ended = everything(second)
    assert whole.keys() == ended.keys()
    assert [name for name in whole if not same(whole[name], ended[name])] == []


def same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) or bool(left.isnan().all() and right.isnan().all())


@on_gpu
def test_a_captured_run_that_diverges_is_noticed_at_the_end_of_the_epoch(digits: Dataset) -> None:
    with pytest.raises(DivergedError, match="in epoch 2 "):
        trained(replace(RECIPE, epochs=3, milestones=(1,), decay=1e30), digits, Speed())


@on_gpu
def test_neighbours_on_a_gpu_change_no_bit_of_a_run(tmp_path: Path) -> None:
    weights = []
    for at_once in ("1", "4"):
        words = ["compare", "digits", "--regularisers", "none", "maxgain=0.8+batchnorm+dropout", "--seeds", "2"]
        words += ["--epochs", "2", "--augment", "--out", str(tmp_path / at_once)]
        assert cli.main([*words, "--device", "cuda", "--per-gpu", at_once]) == 0
        runs = records.read(tmp_path / at_once / "results").runs
        weights.append({run["key"]: run["weights_sha256"] for run in runs})
    assert len(weights[0]) == 4
    assert weights[0] == weights[1]
