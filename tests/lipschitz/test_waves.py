"""The norm of a convolution is looked for near a wave, and is found whatever the convolution is like."""

import pytest
import torch
from torch import nn

from maxgain import operator_norms
from maxgain.lipschitz.maps import Convolution

SIZE = 24
CONVOLUTIONS = {
    "plain": nn.Conv2d(2, 3, 3, padding=1),
    "dilated": nn.Conv2d(2, 3, 3, padding=2, dilation=2),
    "circular": nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"),
    "no padding": nn.Conv2d(2, 2, (1, 5)),
    "zero": nn.Conv2d(2, 2, 3),
}
nn.init.zeros_(CONVOLUTIONS["zero"].weight)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_a_norm_that_is_looked_for_near_a_wave_is_that_of_the_matrix(name):
    conv = CONVOLUTIONS[name]
    basis = torch.eye(conv.in_channels * SIZE * SIZE, dtype=torch.float64).view(-1, conv.in_channels, SIZE, SIZE)
    with torch.no_grad():
        matrix = conv._conv_forward(basis, conv.weight.double(), None).flatten(1)
    report = operator_norms(nn.Sequential(conv), torch.randn(1, conv.in_channels, SIZE, SIZE))
    assert report.norms["0"] == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4)


def test_a_norm_in_one_dimension():
    conv = nn.Conv1d(2, 2, 5, padding=2)
    basis = torch.eye(2 * 500, dtype=torch.float64).view(-1, 2, 500)
    with torch.no_grad():
        matrix = conv._conv_forward(basis, conv.weight.double(), None).flatten(1)
    norms = operator_norms(nn.Sequential(conv), torch.randn(1, 2, 500)).norms
    assert norms["0"] == pytest.approx(float(torch.linalg.matrix_norm(matrix, 2)), rel=1e-4)


def test_a_wave_saves_iterations(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), torch.randn(1, 8, 40, 40)
    near_a_wave = operator_norms(model, x, tolerance=1e-3).layers["0"]
    monkeypatch.setattr(Convolution, "start", lambda self: None)
    at_random = operator_norms(model, x, tolerance=1e-3).layers["0"]
    assert near_a_wave.value == pytest.approx(at_random.value, rel=1e-3)
    assert near_a_wave.iterations < at_random.iterations / 2
