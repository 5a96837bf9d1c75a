"""Hugging Face's own Trainer, and Accelerate, driven with small models on the CPU, against a loop written out."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from maxgain import MaxGain
from maxgain.errors import StateError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from maxgain.integrations.callback import ConstrainingCallback  # noqa: E402
from maxgain.integrations.transformers import MaxGainCallback  # noqa: E402

GAMMA = 0.4
STEPS = 12
SAVING = {"save_strategy": "steps", "save_steps": STEPS // 2}
Batch = dict[str, Tensor]


def gpt2() -> Any:
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "n_positions": 10, "n_embd": 16, "n_layer": 2, "n_head": 2}
    noiseless = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **noiseless, bos_token_id=0, eos_token_id=0))


def sentences() -> list[Batch]:
    torch.manual_seed(4)
    tokens = (torch.randint(40, (24, 1)) + torch.arange(10)) % 40
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts the first token, and not every version leaves it out when it counts them
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer(folder: Path, model: nn.Module, callback: Any, **options: Any) -> Any:
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    arguments = TrainingArguments(**(arguments | options))
    return Trainer(model, arguments, train_dataset=sentences(), callbacks=[callback])


def looped(model: nn.Module, every: int = 1) -> list[dict[str, float]]:
    """The same training without a framework."""
    rows = [torch.utils.data.default_collate(sentences()[start : start + 4]) for start in range(0, 24, 4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, GAMMA).attach(optimizer)
    history = []
    for number in range(STEPS * every):
        (model(**rows[number % len(rows)]).loss / every).backward()
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
            history.append(constraint.gains)
    constraint.detach()
    return history


def distance(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((mine - theirs).detach().abs().max()) for mine, theirs in pairs)


@pytest.mark.parametrize("every", [1, 3])
def test_a_callback_trains_as_the_loop_does_with_and_without_accumulation(tmp_path: Path, every: int) -> None:
    model, expected, callback = gpt2(), gpt2(), MaxGainCallback(gamma=GAMMA)
    trainer(tmp_path, model, callback, gradient_accumulation_steps=every).train()
    history = looped(expected, every)
    assert max(history[-1].values()) > GAMMA, "else this test could not fail"
    assert callback.constraint is not None
    assert callback.constraint.gains == pytest.approx(history[-1], rel=1e-4)
    assert distance(model, expected) < 1e-5


@pytest.mark.parametrize("restores", [False, True])
def test_a_resumed_training_begins_with_the_saved_state_and_ends_in_the_same_bits(
    tmp_path: Path, restores: bool
) -> None:
    class Beginning(MaxGainCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            assert self.constraint is not None
            began.append(self.constraint.gains)

    began: list[dict[str, float]] = []
    whole, resumed, expected = gpt2(), gpt2(), gpt2()
    trainer(tmp_path, whole, Beginning(gamma=GAMMA, exclude=("lm_head",)), **SAVING).train()
    again = trainer(
        tmp_path, resumed, Beginning(gamma=GAMMA, exclude=("lm_head",)), **SAVING,
        restore_callback_states_from_checkpoint=restores,
    )  # fmt: skip
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert distance(whole, resumed) == 0
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(expected, GAMMA, exclude="lm_head").attach(optimizer)
    assert began[1].keys() == constraint.gains.keys()
    assert all(math.isnan(gain) for gain in began[0].values())
    saved = json.loads((tmp_path / f"checkpoint-{STEPS // 2}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["Beginning"]["args"] == {"gamma": GAMMA, "exclude": ["lm_head"]}
    assert all(gain > 0 for gain in began[1].values())


def test_a_restored_callback_has_the_bounds_of_a_mapping_in_their_order(tmp_path: Path) -> None:
    bounds = {"*.mlp.*": GAMMA, "*": 2 * GAMMA}  # '*' would come first in an alphabet
    trainer(tmp_path, gpt2(), MaxGainCallback(bounds), **SAVING).train()
    again = trainer(tmp_path, gpt2(), MaxGainCallback(bounds), restore_callback_states_from_checkpoint=True)
    again.train(str(tmp_path / f"checkpoint-{STEPS // 2}"))
    (restored,) = [one for one in again.callback_handler.callbacks if isinstance(one, MaxGainCallback)]
    assert restored.constraint is not None
    assert {GAMMA, 2 * GAMMA} == set(restored.constraint.bounds.values())
    assert restored.constraint.bounds["transformer.h.0.mlp.c_fc"] == GAMMA


def test_a_checkpoint_that_was_written_without_the_callback_can_be_gone_on_from_with_it(tmp_path: Path) -> None:
    first = trainer(tmp_path, gpt2(), MaxGainCallback, **SAVING)
    first.pop_callback(MaxGainCallback)
    first.train()
    callback = MaxGainCallback(gamma=GAMMA)
    trainer(tmp_path, gpt2(), callback, **SAVING).train(str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert callback.constraint is not None
    assert all(gain > 0 for gain in callback.constraint.gains.values())


def test_a_state_of_other_layers_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, gpt2(), MaxGainCallback(gamma=GAMMA, exclude="lm_head"), **SAVING).train()
    again = trainer(tmp_path, gpt2(), MaxGainCallback(gamma=GAMMA))
    with pytest.raises(StateError, match="lm_head"):
        again.train(str(tmp_path / f"checkpoint-{STEPS // 2}"))


def test_gains_are_logged_with_the_loss_to_wherever_the_trainer_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    told = trainer(
        tmp_path, gpt2(), MaxGainCallback(gamma=GAMMA), logging_strategy="steps", logging_steps=4,
        report_to="tensorboard",
    )  # fmt: skip
    told.train()
    name = "gain/transformer.h.1.mlp.c_fc"
    logged = {row["step"]: row[name] for row in told.state.log_history if name in row}
    history = looped(gpt2())
    assert logged == pytest.approx(
        {step: history[step - 1][name.removeprefix("gain/")] for step in (4, 8, 12)}, rel=1e-4
    )
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    drawn = {event.step: event.value for event in board.Scalars(f"train/{name}")}
    assert drawn == pytest.approx(logged)


def test_a_model_is_plain_after_training_and_another_can_be_trained(tmp_path: Path) -> None:
    callback = MaxGainCallback(gamma=GAMMA)
    for _ in range(2):
        model = gpt2()
        trainer(tmp_path, model, callback).train()
        assert not any(layer._forward_hooks for layer in model.modules())


def test_two_callbacks_share_a_model_and_its_checkpoints(tmp_path: Path) -> None:
    class Beginning(MaxGainCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            super().on_train_begin(*args, **kwargs)
            assert self.constraint is not None
            began.append(self.constraint.gains)

    def train(model: nn.Module, checkpoint: str | None = None) -> None:
        first = Beginning(GAMMA, include="*.mlp.*", measure="fresh")
        made = trainer(tmp_path, model, first, save_strategy="steps", save_steps=STEPS // 4)
        made.add_callback(Beginning(2 * GAMMA, include="*.attn.*"))
        made.train(checkpoint)

    began: list[dict[str, float]] = []
    whole, resumed = gpt2(), gpt2()
    train(whole)
    train(resumed, str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert distance(whole, resumed) == 0
    saved = json.loads((tmp_path / f"checkpoint-{STEPS // 2}" / "trainer_state.json").read_text())
    newest = [row["attributes"]["saved"] for row in saved["stateful_callbacks"]["Beginning"][-2:]]
    for gains, numbers in zip(began[2:], newest, strict=True):
        assert gains == {name: pytest.approx(numbers[f"{name}.size"]) for name in gains}


def test_numbers_of_numpy_can_be_saved_in_a_checkpoint(tmp_path: Path) -> None:
    gamma = {"lm_head": math.inf, "*": np.float32(GAMMA)}
    callback = MaxGainCallback(gamma, p=np.float32(2), every=np.int64(2))
    trainer(tmp_path, gpt2(), callback, max_steps=2, save_strategy="steps", save_steps=1).train()
    saved = json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["stateful_callbacks"]
    assert saved["MaxGainCallback"]["args"] == {
        "gamma": {"lm_head": math.inf, "*": float(np.float32(GAMMA))},
        "p": 2,
        "every": 2,
    }


def test_a_misspelt_argument_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="gama"):
        MaxGainCallback(gama=2.0)


def test_a_step_that_accelerates_scaler_skips_projects_nothing() -> None:
    """Accelerate has a scaler on GPUs only; here its wrapper is given one for the CPU."""
    Accelerator(cpu=True)  # its optimisers look at the state that this makes
    wrapped = nn.Linear(4, 4)
    plain = nn.Linear(4, 4)
    plain.load_state_dict(wrapped.state_dict())
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (wrapped, plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accelerated = AcceleratedOptimizer(optimizers[0], scaler=scaler)
    ConstrainingCallback(gamma=0.1).begin(wrapped, [accelerated])
    MaxGain(plain, 0.1).attach(optimizers[1])
    for step in range(4):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        overflows = step == 1
        scaler.scale(wrapped(100 * x if overflows else x).square().mean() * (math.inf if overflows else 1)).backward()
        accelerated.step()
        accelerated.zero_grad()
        assert accelerated.step_was_skipped == overflows
        if not overflows:
            plain(x).square().mean().backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert distance(wrapped, plain) < 1e-7
