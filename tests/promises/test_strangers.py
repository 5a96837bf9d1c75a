"""Models that were not written for this project train under the constraint, without a change to their code.

The batches have 32 instances, for a reason: gains are measured here in evaluation mode, and with batches of 8 a deep
batch norm (one place per channel is left of a small image) sees inputs that differ so much between the modes that its
gain then exceeds the bound by up to 12 %. Without batch norm the excess is at most 2 % either way.
"""

import pytest
import torch
import torch.nn.functional as F
from monai.networks.nets import ResNet, UNet
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)
from transformers.pytorch_utils import Conv1D

from maxgain import MaxGain
from maxgain.measure import measure_gains

GAMMA = 1.5
STEPS = 50
BATCHES = 4
INSTANCES = 32
TOKENS = 20


def stripes(channels):
    """Noisy stripes across or along an image; the direction is its class."""
    labels = torch.randint(2, (INSTANCES,))
    across = torch.sin(torch.arange(16) * torch.randint(1, 4, (INSTANCES, 1))).sign().view(INSTANCES, 1, 1, 16)
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, across, across.transpose(2, 3)).repeat(1, channels, 1, 1)
    return images + 0.5 * torch.randn_like(images), labels


def counting():
    """Sentences that count, from somewhere and by ones, twos or threes."""
    tokens = (torch.randint(TOKENS, (INSTANCES, 1)) + torch.arange(12) * torch.randint(1, 4, (INSTANCES, 1))) % TOKENS
    return {"input_ids": tokens, "labels": tokens}


# Each a model, a function that makes a batch for it, and its loss. The language models begin with weights that are
# fifteen times larger than usual, because they would hardly grow to the bound in so few steps.


def monai_resnet18():
    model = ResNet("basic", [2, 2, 2, 2], [8, 16, 32, 64], spatial_dims=2, n_input_channels=3, num_classes=2)
    return model, lambda: stripes(3), lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def hugging_face_resnet():
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [2, 2, 2]}
    model = ResNetForImageClassification(ResNetConfig(**sizes, layer_type="basic", num_labels=2))
    return model, lambda: stripes(3), lambda batch: model(*batch).loss


def llama():
    """A GPT of dense layers alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=TOKENS, initializer_range=0.3))
    return model, counting, lambda batch: model(**batch).loss


def gpt2():
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 12}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, **no_dropout, vocab_size=TOKENS, initializer_range=0.3))
    return model, counting, lambda batch: model(**batch).loss


def monai_unet():
    sizes = {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 2}
    model = UNet(spatial_dims=2, in_channels=1, out_channels=1, **sizes, norm="batch")
    return model, lambda: stripes(1), lambda batch: F.mse_loss(model(batch[0]), batch[0].sign())


STRANGERS = {
    monai_resnet18: {nn.Conv2d, nn.BatchNorm2d, nn.Linear},
    hugging_face_resnet: {nn.Conv2d, nn.BatchNorm2d, nn.Linear},
    llama: {nn.Linear},
    gpt2: {Conv1D, nn.Linear},
    monai_unet: {nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d},
}


def train(stranger, gamma):
    """The largest gain of every layer over the training batches afterwards, the first and last loss, and the model."""
    torch.manual_seed(0)
    model, batch, loss = stranger()
    batches = [batch() for _ in range(BATCHES)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    MaxGain(model, gamma=gamma).attach(optimizer)
    losses = []
    model.train()
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(batches[step % BATCHES])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    largest = {layer: quantiles[-1] for layer, quantiles in measure_gains(model, batches).quantiles().items()}
    return largest, losses, model


@pytest.mark.parametrize("stranger", STRANGERS, ids=lambda stranger: stranger.__name__)
def test_promise_12_a_stranger_trains_and_every_layer_is_within_five_percent_of_the_bound(stranger):
    largest, losses, model = train(stranger, GAMMA)
    assert {type(model.get_submodule(layer)) for layer in largest} == STRANGERS[stranger]
    assert {layer: gain for layer, gain in largest.items() if gain > 1.05 * GAMMA} == {}
    assert losses[-1] < 0.75 * losses[0]
    unconstrained, _, _ = train(stranger, float("inf"))
    assert max(unconstrained.values()) > 1.5 * GAMMA, "without the constraint the bound should not hold"


def test_promise_09_the_embedding_that_gpt2_ties_to_its_head_stays_tied():
    _, _, model = train(gpt2, GAMMA)
    assert model.lm_head.weight is model.transformer.wte.weight
