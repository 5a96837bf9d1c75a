"""A checkpoint holds all there is between two steps, and one that is damaged or another run's is refused."""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from maxgain.errors import CheckpointError, RunError
from maxgain.study import capture, checkpoint
from maxgain.study.cli import app as cli
from maxgain.study.data.splits import Dataset
from maxgain.study.recipes import RECIPES, Recipe
from maxgain.study.regularisers import REGULARISERS
from maxgain.study.run_files import CHECKPOINT
from maxgain.study.runs import Place, Watcher, perform
from maxgain.study.training import MEMORY_FORMATS, Training

CPU = torch.device("cpu")
RECIPE = replace(
    RECIPES["digits"], network="mlp", regulariser="maxgain+batchnorm+dropout", augment=True, epochs=3, fold=0
)
SCORES = {f"{part}_{what}": 0.5 for part in ("train", "validation") for what in ("loss", "accuracy")}
HISTORY = [{"epoch": 1, "learning_rate": 1e-3, "max_gain": {"features.0": 1.5}, "seconds": 0.5, **SCORES}]


def begun(recipe: Recipe, dataset: Dataset, steps: int) -> Training:
    """A training in the middle of its first epoch."""
    training = Training(recipe, dataset, CPU)
    training.begin_epoch()
    for _ in range(steps):
        training.step()
    return training


def everything(training: Training) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in training.state().items()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]) or left[name].isnan().all(), name


EVERY_ROW = [{"regulariser": name, "network": network} for name in REGULARISERS for network in ("mlp", "cnn")]


@pytest.mark.parametrize(
    "changed",
    [*EVERY_ROW, {"optimiser": "sgd"}, {"measure": "fresh"}, {"regulariser": "lipschitz-2=0.5+batchnorm+dropout"}],
    ids=lambda changed: " ".join(changed.values()),
)
def test_promise_14_a_loaded_training_steps_to_the_same_bits(tmp_path, digits, changed) -> None:
    recipe = replace(RECIPE, learning_rate=0.01, **changed)
    first = begun(recipe, digits, steps=2)
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, first, HISTORY)
    saved = everything(first)
    for _ in range(3):
        first.step()
    gone_on = everything(first)

    second = Training(recipe, digits, CPU)
    assert checkpoint.load(path, second) == HISTORY
    assert_same(everything(second), saved)
    for _ in range(3):
        second.step()
    assert_same(everything(second), gone_on)
    assert second.epoch == first.epoch


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_what_an_optimiser_keeps_lies_in_memory_as_its_parameters_do_after_loading(
    tmp_path, digits, monkeypatch, optimiser
) -> None:
    # As on a GPU, whose fused optimisers refuse anything else.
    monkeypatch.setitem(MEMORY_FORMATS, ("cpu", "cnn"), torch.channels_last)
    recipe = replace(RECIPE, network="cnn", optimiser=optimiser)
    checkpoint.save(tmp_path / "c", begun(recipe, digits, steps=2), [])
    training = Training(recipe, digits, CPU)
    checkpoint.load(tmp_path / "c", training)
    strides = {parameter.stride() for parameter in training.model.parameters()}
    assert any(len(stride) == 4 and stride[1] == 1 < stride[3] for stride in strides)
    for parameter, kept in training.optimiser.state.items():
        assert {value.stride() for name, value in kept.items() if name != "step"} == {parameter.stride()}


def test_running_out_of_memory_says_nothing_of_the_checkpoint(tmp_path, digits, monkeypatch) -> None:
    checkpoint.save(tmp_path / "c", begun(RECIPE, digits, steps=2), [])
    training = Training(RECIPE, digits, CPU)

    def load_state_dict(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(training.optimiser, "load_state_dict", load_state_dict)
    with pytest.raises(RunError, match="not enough memory"):
        checkpoint.load(tmp_path / "c", training)


def test_a_run_that_is_taken_up_leaves_the_random_numbers_to_one_that_is_being_set_up(digits) -> None:
    state = everything(begun(RECIPE, digits, steps=2))
    training, expected = Training(RECIPE, digits, CPU), torch.Generator().manual_seed(1)
    with capture.setting_up:
        torch.manual_seed(1)
        loading = threading.Thread(target=training.load_state, args=(state,))
        loading.start()
        loading.join(0.5)
        assert torch.equal(torch.randn(4), torch.randn(4, generator=expected))
    loading.join()
    assert torch.equal(torch.get_rng_state(), state["rng.cpu"])


def test_the_learning_rate_still_follows_the_schedule_after_loading(tmp_path, digits) -> None:
    recipe = replace(RECIPE, milestones=(1,), decay=0.5)
    checkpoint.save(tmp_path / "c", begun(recipe, digits, steps=1), [])
    training = Training(recipe, digits, CPU)
    checkpoint.load(tmp_path / "c", training)
    training.epoch = 1
    training.begin_epoch()
    assert [float(group["lr"]) for group in training.optimiser.param_groups] == [pytest.approx(0.0005)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory, digits) -> tuple[bytes, Training]:
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    checkpoint.save(path, begun(replace(RECIPE, network="cnn"), digits, steps=1), HISTORY)
    return path.read_bytes(), Training(replace(RECIPE, network="cnn"), digits, CPU)


def test_no_flipped_bit_goes_unseen(tmp_path, saved) -> None:
    whole, training = saved
    before = everything(training)
    header = 8 + int.from_bytes(whole[:8], "little")
    chance = random.Random(0)
    places = [*range(8), *chance.sample(range(8, header), 150), *chance.sample(range(header, len(whole)), 50)]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << chance.randrange(8)
        (tmp_path / "c").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"remove it to start|another version"):
            checkpoint.load(tmp_path / "c", training)
    assert_same(everything(training), before)
    (tmp_path / "c").write_bytes(whole)
    checkpoint.load(tmp_path / "c", training)  # the whole one is not refused


def test_promise_14_no_truncated_file_is_accepted(tmp_path, saved) -> None:
    whole, training = saved
    for length in (0, 1, 8, 9, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "c").write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="is damaged or no checkpoint; remove it to start the run again"):
            checkpoint.load(tmp_path / "c", training)


def test_other_files_are_no_checkpoints(tmp_path, saved) -> None:
    _, training = saved
    (tmp_path / "weights").write_bytes(safetensors.torch.save(training.model.state_dict()))
    (tmp_path / "folder").mkdir()
    for name in ("weights", "folder"):
        with pytest.raises(CheckpointError, match=f"{name} is damaged or no checkpoint"):
            checkpoint.load(tmp_path / name, training)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*missing"):
        checkpoint.load(tmp_path / "missing", training)


def test_another_format_is_named(tmp_path, saved, monkeypatch) -> None:
    whole, training = saved
    (tmp_path / "c").write_bytes(whole)
    monkeypatch.setattr(checkpoint, "FORMAT", "3")
    with pytest.raises(CheckpointError, match="another version of maxgain, in format 2"):
        checkpoint.load(tmp_path / "c", training)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"milestones": (7,)}, r"there milestones is \[\], here \[7\]"),
        ({"weight_decay": 0.1}, "there weight-decay is 0.0, here 0.1"),
        ({"regulariser": "none"}, "there regulariser is 'maxgain=2.batchnorm.dropout=1', here 'none'"),
        ({"seed": 1}, "there seed is 0, here 1"),
        ({"p": float("inf")}, "there p is 2.0, here 'inf'"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_and_says_why(tmp_path, digits, changed, said) -> None:
    checkpoint.save(tmp_path / "c", begun(RECIPE, digits, steps=1), [])
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path / "c", Training(replace(RECIPE, **changed), digits, CPU))


def test_promise_18_a_checkpoint_of_other_data_is_refused(tmp_path, digits) -> None:
    checkpoint.save(tmp_path / "c", begun(RECIPE, digits, steps=1), [])
    fewer = replace(digits, train=digits.train[:50])
    with pytest.raises(CheckpointError, match=r"c is of other data: .* use the same --data, or another --out"):
        checkpoint.load(tmp_path / "c", Training(RECIPE, fewer, CPU))


def test_a_checkpoint_of_another_device_is_refused(tmp_path, digits, monkeypatch) -> None:
    checkpoint.save(tmp_path / "c", begun(RECIPE, digits, steps=1), [])
    training = Training(RECIPE, digits, CPU)
    training.device = torch.device("cuda")
    with pytest.raises(CheckpointError, match=r"was written on cpu, .* use --device cpu"):
        checkpoint.load(tmp_path / "c", training)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, digits) -> dict[str, bytes]:
    """The files of a run that was stopped after its first epoch."""
    out = tmp_path_factory.mktemp("stopped") / "run"

    def stop(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        perform(RECIPE, Place(out), digits, watcher=Watcher(epoch_done=stop))
    return {path.name: path.read_bytes() for path in out.iterdir()}


def flipped(content: bytes) -> bytes:
    return content[:-1000] + bytes([content[-1000] ^ 1]) + content[-999:]


@pytest.mark.parametrize(
    ("spoil", "flags", "said"),
    [
        (flipped, (), "is damaged: its checksum does not fit; remove it"),
        (lambda content: content[:-7], (), "is damaged or no checkpoint; remove it"),
        (lambda content: b"", (), "is damaged or no checkpoint; remove it"),
        (
            lambda content: content,
            ("--seed", "1"),
            "is of another recipe: there seed is 0, here 1; 'maxgain",
        ),
        (
            lambda content: content,
            ("--gamma", "3"),
            "there regulariser is 'maxgain=2+batchnorm+dropout=1', here 'maxgain=3+",
        ),
    ],
    ids=["flipped bit", "truncated", "empty", "another seed", "another gamma"],
)
def test_resuming_from_what_does_not_fit_is_one_sentence_and_loses_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stopped: dict[str, bytes],
    spoil: Callable[[bytes], bytes],
    flags: tuple[str, ...],
    said: str,
) -> None:
    files = stopped | {CHECKPOINT: spoil(stopped[CHECKPOINT])}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    command = ["train", "digits", "--network", "mlp", "--regulariser", RECIPE.regulariser, "--augment"]
    command += ["--epochs", "3", "--fold", "0", "--out", str(tmp_path), "--resume", *flags]
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"maxgain: {tmp_path if flags else tmp_path / CHECKPOINT} ")
    assert said in told
    assert told.count("\n") == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_a_run_goes_on_with_the_number_of_threads_that_it_had(tmp_path, digits) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        recipe = replace(RECIPES["digits"], network="mlp", fold=0)
        checkpoint.save(tmp_path / "checkpoint", Training(recipe, digits, CPU), [])
        torch.set_num_threads(1)
        checkpoint.load(tmp_path / "checkpoint", Training(recipe, digits, CPU))
        assert torch.get_num_threads() == 2, "a sum in another order has other bits"
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("which", "change"),
    [
        ("optimiser.0.exp_avg", lambda tensor: None),
        ("optimiser.0.step", lambda tensor: None),
        ("optimiser.1.exp_avg_sq", lambda tensor: tensor.flatten()[:1]),
        ("optimiser.1.step", lambda tensor: tensor.expand(3).contiguous()),
        ("optimiser.2.exp_avg", lambda tensor: tensor.bool()),
        ("model.", lambda tensor: tensor.double()),
        ("loop.order", lambda tensor: tensor + 2**31),
        ("loop.order", lambda tensor: tensor - 1),
        ("loop.position", lambda tensor: tensor + 10**6),
        ("loop.position", lambda tensor: tensor - 10**6),
        ("loop.epoch", lambda tensor: tensor - 1),
        ("loop.epoch", lambda tensor: tensor + 99),
        ("rng.cpu", lambda tensor: tensor[:8]),
    ],
)
def test_tensors_that_no_training_has_are_refused_though_the_checksum_fits(tmp_path, digits, which, change) -> None:
    path = tmp_path / "c"
    training = begun(RECIPE, digits, steps=1)
    checkpoint.save(path, training, HISTORY)
    with safetensors.safe_open(path, framework="pt") as file:
        header = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    name = next(key for key in tensors if key.startswith(which))
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed
    header["sha256"] = checkpoint._digest(header["about"], tensors)
    path.write_bytes(safetensors.torch.save(tensors, header))
    with pytest.raises(CheckpointError, match="does not fit"):
        checkpoint.load(path, Training(RECIPE, digits, CPU))


def test_a_history_that_no_training_has_is_refused_though_the_checksum_fits(tmp_path, digits) -> None:
    path = tmp_path / "c"
    checkpoint.save(path, begun(RECIPE, digits, steps=1), [HISTORY[0] | {"seconds": [None]}])
    with pytest.raises(CheckpointError, match="is no checkpoint of this version"):
        checkpoint.load(path, Training(RECIPE, digits, CPU))
