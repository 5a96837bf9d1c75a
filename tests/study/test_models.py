"""The networks are the paper's: sizes, places of batch norm and dropout, initial weights, names."""

import math
import pickle

import pytest
import torch
from torch import nn

from maxgain.errors import RecipeError
from maxgain.study import models
from maxgain.study.models import NETWORKS

NATIVE = {"vgg19": (3, 32, 32), "svhn_vgg": (3, 32, 32), "wrn16_4": (3, 32, 32), "cnn": (1, 8, 8), "mlp": (1, 8, 8)}
EVERY_KIND = [(False, None), (True, None), (False, nn.Dropout), (True, nn.Dropout)]

every_network = pytest.mark.parametrize("name", NETWORKS)
every_kind = pytest.mark.parametrize(("batchnorm", "dropout"), EVERY_KIND)


def on_meta(name, shape, classes=10, **kind):
    """A network without memory: enough for shapes, names and counts, and free."""
    with torch.device("meta"):
        return NETWORKS[name](shape, classes, **kind)


def size(network):
    return sum(parameter.numel() for parameter in network.parameters())


def conv(inputs, outputs, kernel=3, bias=True):
    return kernel * kernel * inputs * outputs + bias * outputs


def dense(inputs, outputs):
    return inputs * outputs + outputs


def norms(*channels):
    """A batch norm has a scale and a shift for each channel."""
    return 2 * sum(channels)


def wrn_sizes(classes, channels=3):
    """WRN-16-4 by hand: stem, three groups of two blocks, classifier; then its 13 batch norms."""
    plain = conv(channels, 16, bias=False)
    plain += conv(16, 64, bias=False) + 3 * conv(64, 64, bias=False) + conv(16, 64, 1, bias=False)
    plain += conv(64, 128, bias=False) + 3 * conv(128, 128, bias=False) + conv(64, 128, 1, bias=False)
    plain += conv(128, 256, bias=False) + 3 * conv(256, 256, bias=False) + conv(128, 256, 1, bias=False)
    plain += dense(256, classes)
    return plain, plain + norms(16, 64, 64, 64, 64, 128, 128, 128, 128, 256, 256, 256, 256)


def by_hand():
    """Each network's shape, classes, and number of parameters without and with batch norm."""
    vgg19 = conv(3, 64) + conv(64, 64)
    vgg19 += conv(64, 128) + conv(128, 128)
    vgg19 += conv(128, 256) + 3 * conv(256, 256)
    vgg19 += conv(256, 512) + 7 * conv(512, 512)
    vgg19_norms = norms(*[64] * 2, *[128] * 2, *[256] * 4, *[512] * 8)
    vgg19_top = dense(512, 512) + dense(512, 512) + dense(512, 10)  # 32 / 2^5 = 1 pixel of 512 channels

    svhn = conv(3, 64) + conv(64, 64) + conv(64, 128) + conv(128, 128)
    svhn += conv(128, 192) + conv(192, 192) + conv(192, 256) + conv(256, 256)
    svhn += dense(256 * 2 * 2, 512) + dense(512, 512) + dense(512, 10)  # 32 / 2^4 = 2 pixels on each side
    svhn_norms = norms(*[64] * 2, *[128] * 2, *[192] * 2, *[256] * 2)

    cnn = conv(1, 32) + conv(32, 32) + conv(32, 64) + conv(64, 64) + dense(64 * 2 * 2, 128) + dense(128, 10)
    mlp = dense(64, 256) + dense(256, 256) + dense(256, 10)
    wide = 3 * 32 * 32
    return [
        ("vgg19", (3, 32, 32), 10, vgg19 + vgg19_top, vgg19 + vgg19_top + vgg19_norms),
        ("svhn_vgg", (3, 32, 32), 10, svhn, svhn + svhn_norms),
        ("wrn16_4", (3, 32, 32), 100, *wrn_sizes(100)),
        ("wrn16_4", (3, 96, 96), 10, *wrn_sizes(10)),
        ("wrn16_4", (1, 8, 8), 10, *wrn_sizes(10, channels=1)),
        ("cnn", (1, 8, 8), 10, cnn, cnn + norms(32, 32, 64, 64)),
        ("mlp", (1, 8, 8), 10, mlp, mlp + norms(256, 256)),
        (
            "mlp",
            (3, 32, 32),
            100,
            dense(wide, 256) + dense(256, 256) + dense(256, 100),
            dense(wide, 256) + dense(256, 256) + dense(256, 100) + norms(256, 256),
        ),
    ]


@pytest.mark.parametrize(("name", "shape", "classes", "plain", "normalised"), by_hand())
def test_sizes_and_output_are_as_worked_out_by_hand(name, shape, classes, plain, normalised):
    images = torch.empty(7, *shape, device="meta")
    for batchnorm, expected in [(False, plain), (True, normalised)]:
        for dropout in (None, nn.Dropout):
            network = on_meta(name, shape, classes, batchnorm=batchnorm, dropout=dropout)
            assert size(network) == expected
            assert network(images).shape == (7, classes)


def test_the_table_of_sizes_leaves_no_network_out():
    assert {name for name, *_ in by_hand()} == set(NETWORKS) == set(NATIVE)


def test_totals():
    """The formulas again as plain numbers, so that both cannot slip together."""
    totals = {(name, shape): (plain, normalised) for name, shape, _, plain, normalised in by_hand()}
    assert totals["vgg19", (3, 32, 32)] == (20_554_826, 20_565_834)
    assert totals["wrn16_4", (3, 96, 96)][1] == 2_748_890


@pytest.mark.parametrize(("depth", "width", "millions"), [(16, 4, 2.7), (28, 10, 36.5), (40, 4, 8.9), (22, 8, 17.2)])
def test_any_depth_and_width_has_the_size_its_authors_report(depth, width, millions):
    with torch.device("meta"):
        network = models.wrn(batchnorm=True, depth=depth, width=width)
    assert size(network) / 1e6 == pytest.approx(millions, abs=0.06)
    assert sum(isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) for module in network.modules()) == (
        depth - 3  # all layers but the three 1×1 shortcuts and the classifier
    )


@pytest.mark.parametrize(("depth", "width"), [(17, 4), (4, 4), (16, 0)])
def test_a_depth_that_does_not_exist_is_refused(depth, width):
    with pytest.raises(RecipeError, match=f"no WRN-{depth}-{width}.*6n"):
        models.wrn(depth=depth, width=width)


def test_wrn_works_at_quarter_resolution_in_its_last_group():
    """Strides 1, 2, 2: 96×96 images are 24×24 maps before the mean."""
    network = on_meta("wrn16_4", (3, 96, 96))
    maps = {}
    network.relu.register_forward_hook(lambda module, inputs, output: maps.update(last=tuple(output.shape)))
    network(torch.empty(2, 3, 96, 96, device="meta"))
    assert maps["last"] == (2, 256, 24, 24)


@every_network
def test_names_do_not_depend_on_batch_norm_and_dropout(name):
    def layers(batchnorm, dropout):
        network = on_meta(name, NATIVE[name], batchnorm=batchnorm, dropout=dropout)
        return [key for key, module in network.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]

    assert len({tuple(layers(*kind)) for kind in EVERY_KIND}) == 1


def test_names_read_well():
    vgg = on_meta("vgg19", (3, 32, 32), batchnorm=True)
    names = [key for key, module in vgg.named_modules() if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d)]
    assert names[:4] == ["features.conv1_1", "features.norm1_1", "features.conv1_2", "features.norm1_2"]
    assert names[-4:] == ["features.norm5_4", "classifier.fc1", "classifier.fc2", "classifier.fc3"]
    wrn = on_meta("wrn16_4", (3, 32, 32))
    names = [key for key, module in wrn.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert names[:4] == ["stem", "group1.0.conv1", "group1.0.conv2", "group1.0.shortcut"]
    assert names[-3:] == ["group3.1.conv1", "group3.1.conv2", "classifier"]


@every_network
@every_kind
def test_modules_run_in_the_order_of_their_names(name, batchnorm, dropout):
    network = on_meta(name, NATIVE[name], batchnorm=batchnorm, dropout=dropout)
    leaves = [(key, module) for key, module in network.named_modules() if not list(module.children())]
    ran = []
    for key, module in leaves:
        module.register_forward_hook(lambda module, inputs, output, key=key: ran.append(key))
    network(torch.empty(4, *NATIVE[name], device="meta"))
    assert ran == [key for key, _ in leaves]


def rates(name):
    """The rates asked for, in order, by a network with dropout."""
    asked = []

    def factory(rate):
        asked.append(rate)
        return nn.Dropout(rate)

    on_meta(name, NATIVE[name], dropout=factory)
    return asked


def test_dropout_rates_are_the_papers():
    assert rates("vgg19") == [0.2] * 14 + [0.5] * 2  # 16 convolutions less the two before the first pool
    assert rates("svhn_vgg") == [0.2] * 6 + [0.5] * 2
    assert rates("wrn16_4") == [0.3] * 6
    assert rates("cnn") == [0.2] * 2 + [0.5]
    assert rates("mlp") == [0.5] * 2


@every_network
def test_dropout_feeds_a_layer_and_follows_a_relu(name):
    """Each noise takes activations, never pixels, and what it puts out goes straight into a weight."""
    torch.manual_seed(0)
    network = NETWORKS[name](NATIVE[name], 10, batchnorm=True, dropout=nn.Dropout)
    noises, fed = [], set()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda module, inputs, output: noises.append((inputs[0], output)))
        elif isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_pre_hook(lambda module, inputs: fed.add(id(inputs[0])))
    network(torch.rand(2, *NATIVE[name]) * 2 - 1)
    assert len(noises) == len(rates(name))
    assert all(before.min() >= 0 and id(after) in fed for before, after in noises)


@every_network
def test_initial_weights_are_he_normal(name):
    torch.manual_seed(0)
    network = NETWORKS[name](NATIVE[name], 10, batchnorm=True)
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            fan_in = module.weight[0].numel()
            count = module.weight.numel()
            # Five standard errors of the mean and of the standard deviation of a normal sample.
            std = math.sqrt(2 / fan_in)
            assert module.weight.mean().abs() < 5 * std / math.sqrt(count)
            assert abs(module.weight.std() / std - 1) < 5 / math.sqrt(2 * count)
            assert module.bias is None or not module.bias.any()
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            assert torch.equal(module.weight, torch.ones_like(module.weight))
            assert not module.bias.any()


@pytest.mark.parametrize("name", ["wrn16_4", "cnn", "mlp"])
def test_a_seed_gives_the_same_weights_with_and_without_batch_norm_and_dropout(name):
    def weights(seed, batchnorm, dropout):
        torch.manual_seed(seed)
        network = NETWORKS[name](NATIVE[name], 10, batchnorm=batchnorm, dropout=dropout)
        layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
        return torch.cat([layer.weight.detach().flatten() for layer in layers])

    plain = weights(0, False, None)
    assert all(torch.equal(plain, weights(0, *kind)) for kind in EVERY_KIND)
    assert not torch.equal(plain, weights(1, False, None))


@every_network
@every_kind
def test_a_training_step_lowers_the_loss(name, batchnorm, dropout):
    torch.manual_seed(0)
    network = NETWORKS[name](NATIVE[name], 10, batchnorm=batchnorm, dropout=dropout)
    images, labels = torch.rand(4, *NATIVE[name]) * 2 - 1, torch.tensor([3, 1, 4, 1])
    optimiser = torch.optim.SGD(network.parameters(), lr=1e-3)

    def loss():
        torch.manual_seed(1)  # the same masks before and after
        return nn.functional.cross_entropy(network(images), labels)

    before = loss()
    before.backward()
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert all(parameter.grad.any() for key, parameter in network.named_parameters() if key.endswith("weight"))
    optimiser.step()
    assert loss() < before


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_small_networks_learn_to_read_digits(name):
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    network = NETWORKS[name]((1, 8, 8), 10)
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
    for _ in range(3):
        for batch in torch.randperm(1000).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
            optimiser.step()
    with torch.no_grad():
        accuracy = (network(images[1000:]).argmax(1) == labels[1000:]).float().mean()
    assert accuracy > 0.85


@every_network
@pytest.mark.parametrize("batchnorm", [False, True])
def test_networks_compile_as_one_graph(name, batchnorm):
    network = on_meta(name, NATIVE[name], batchnorm=batchnorm, dropout=nn.Dropout)
    torch.compiler.reset()  # all networks share the frames of nn.Sequential, and a frame recompiles only so often
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    assert compiled(torch.empty(2, *NATIVE[name], device="meta")).shape == (2, 10)


@pytest.mark.parametrize("name", ["wrn16_4", "cnn", "mlp"])
def test_evaluation_is_deterministic_and_survives_pickling(name):
    torch.manual_seed(0)
    network = NETWORKS[name](NATIVE[name], 10, batchnorm=True, dropout=nn.Dropout).eval()
    images = torch.rand(2, *NATIVE[name])
    expected = network(images)
    assert torch.equal(network(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(network))(images), expected)


@pytest.mark.parametrize(
    ("wrong", "right"), [("vgg91", "vgg19"), ("VGG19", "vgg19"), ("WRN-16-4", "wrn16_4"), ("svhn-vgg", "svhn_vgg")]
)
def test_an_unknown_network_is_answered_with_the_nearest_name(wrong, right):
    with pytest.raises(RecipeError, match=f"no network '{wrong}': did you mean '{right}'"):
        NETWORKS[wrong]((3, 32, 32), 10)


def test_a_name_like_no_other_is_answered_with_all_names():
    with pytest.raises(RecipeError, match="'transformer': there are vgg19, svhn_vgg, wrn16_4, cnn, mlp"):
        NETWORKS["transformer"]((3, 32, 32), 10)


def test_images_too_small_for_the_pools_are_refused():
    with pytest.raises(RecipeError, match="5 times needs at least 32×32 pixels, not 8×8"):
        NETWORKS["vgg19"]((1, 8, 8), 10)
