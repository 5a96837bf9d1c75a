"""Hugging Face's own Trainer, and Accelerate, driven with small models on the CPU, against a loop written out."""

from pathlib import Path

import pytest
import torch
from torch import nn

from maxgain import MaxGain
from nets import StopError, stop

pytest.importorskip("accelerate")
pytest.importorskip("transformers")
from accelerate import Accelerator  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments  # noqa: E402

from maxgain.integrations.transformers import MaxGainCallback  # noqa: E402

GAMMA, STEPS = 0.4, 12
INF = float("inf")


def gpt2():
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "n_positions": 10, "n_embd": 16, "n_layer": 2, "n_head": 2}
    noiseless = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.2}
    return GPT2LMHeadModel(GPT2Config(**sizes, **noiseless, bos_token_id=0, eos_token_id=0))


def sentences():
    torch.manual_seed(4)
    tokens = (torch.randint(40, (24, 1)) + torch.arange(10)) % 40
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing predicts the first token, and not every version leaves it out when it counts them
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


def trainer(folder: Path, callback, model=None, **options):
    arguments = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "learning_rate": 0.05,
        "lr_scheduler_type": "constant", "optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential", "use_cpu": True, "report_to": "none", "disable_tqdm": True,
        "save_strategy": "no", "logging_strategy": "no",
    }  # fmt: skip
    made = Trainer(model or gpt2(), TrainingArguments(**(arguments | options)), train_dataset=sentences())
    callback.add_to(made)
    return made


def looped():
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    constraint = MaxGain(model, GAMMA).attach(optimizer)
    rows = [torch.utils.data.default_collate(sentences()[start : start + 4]) for start in range(0, 24, 4)]
    for step in range(STEPS):
        model(**rows[step % len(rows)]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, constraint


def test_it_trains_as_a_loop_does_and_leaves_a_plain_model(tmp_path):
    callback = MaxGainCallback(GAMMA)
    trained = trainer(tmp_path, callback)
    trained.train()
    expected, constraint = looped()
    assert min(constraint.scales.values()) < 1, "else nothing was bounded"
    torch.testing.assert_close(list(trained.model.parameters()), list(expected.parameters()), rtol=1e-4, atol=1e-6)
    assert callback.constraint.gains == pytest.approx(constraint.gains, rel=1e-4)
    assert not any(part._forward_hooks for part in trained.model.modules())


def test_tensorboard_and_the_log_get_the_gains_with_the_loss(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callback = MaxGainCallback(INF, every=2, parts={"*.c_attn": ("q", "k", "v")})
    logging = {"logging_strategy": "steps", "logging_steps": 4, "report_to": "tensorboard"}
    trained = trainer(tmp_path, callback, **logging)
    trained.train()
    events = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    worst = [tag for tag in events.Tags()["scalars"] if tag.endswith("gain/worst")]
    assert [event.step for event in events.Scalars(worst[0])] == [4, 8, 12]
    steps = [log for log in trained.state.log_history if "loss" in log]
    assert [event.value for event in events.Scalars(worst[0])] == pytest.approx([log["gain/worst"] for log in steps])
    assert "transformer.h.1.attn.c_attn[k]" in callback.constraint.gains


def test_a_hook_on_the_model_masks_padded_tokens(tmp_path):
    def gains(is_masked):
        def hand_on(model, args, kwargs):
            callback.watching.mask = kwargs["attention_mask"] if is_masked else None

        callback = MaxGainCallback()
        trained = trainer(tmp_path, callback, max_steps=10)
        trained.train_dataset = [row | {"attention_mask": torch.tensor([1] * 3 + [0] * 7)} for row in sentences()]
        trained.model.register_forward_pre_hook(hand_on, with_kwargs=True)
        trained.train()
        return callback.constraint.gains

    every, masked = gains(False), gains(True)
    assert all(masked[name] <= every[name] for name in every)
    assert masked != every


@pytest.mark.filterwarnings("ignore:.*that are not finite")
def test_an_alarm_stops_the_run(tmp_path):
    model = gpt2()
    with torch.no_grad():
        model.transformer.wpe.weight[0, 0] = torch.nan
    with pytest.raises(StopError, match=r"step 1: layer 'transformer\.h\.0\.attn\.c_attn' .*; also .* more"):
        trainer(tmp_path, MaxGainCallback(INF, on_alarm=stop), model).train()
    assert not any(part._forward_hooks for part in model.modules())


def test_a_resumed_training_ends_in_the_same_bits(tmp_path):
    whole = trainer(tmp_path / "whole", MaxGainCallback(GAMMA))
    whole.train()
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    trainer(tmp_path / "cut", MaxGainCallback(GAMMA), **saving).train()
    resumed = trainer(tmp_path / "cut", MaxGainCallback(GAMMA), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "cut" / f"checkpoint-{STEPS // 2}"))
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))


def test_accelerate_is_attached_like_any_optimizer():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    net, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    constraint = MaxGain(net, gamma=0.3).attach(optimizer)
    before = [weight.detach().clone() for weight in plain.parameters()]
    for last in (False, True):
        with accelerator.accumulate(net):
            accelerator.backward(net(torch.randn(8, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, before, plain.parameters())) is not last
    assert min(constraint.scales.values()) < 1
