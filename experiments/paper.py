"""The paper's own numbers: its tables, and the numbers behind its figures. They are typed here once, and nowhere else.

Gouk, Pfahringer, Frank, Cree: MaxGain: Regularisation of neural networks by constraining activation magnitudes. ECML
PKDD 2018, arXiv 1804.05965. Accuracies are in per cent there, and so they are here.
"""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[float, ...]
"""Of a layer's gains: the least, the lower quartile, the median, the upper quartile and the largest."""


@dataclass(frozen=True)
class Number:
    """An accuracy in per cent, with its standard error where there is one."""

    accuracy: float
    standard_error: float | None = None

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2f}"
        return f"{self.accuracy:.2f}{error}"


Table = dict[str, Number]
"""Accuracies by row. Rows are called what this project calls their regularisers."""

CIFAR10: Table = {
    "none": Number(88.29),
    "dropout": Number(89.71),
    "batchnorm": Number(90.80),
    "batchnorm+dropout": Number(90.90),
    "maxgain": Number(90.75),
    "maxgain+dropout": Number(90.95),
    "maxgain+batchnorm": Number(91.76),
    "maxgain+batchnorm+dropout": Number(91.52),
}
"""VGG-19. One run each."""
CIFAR100: Table = {
    "batchnorm": Number(75.34),
    "batchnorm+dropout": Number(75.72),
    "maxgain+batchnorm": Number(75.89),
    "maxgain+batchnorm+dropout": Number(76.44),
}
"""A wide residual network of depth 16 and width 4. One run each."""
SVHN: Table = {
    "none": Number(96.99),
    "dropout": Number(97.72),
    "batchnorm": Number(96.97),
    "batchnorm+dropout": Number(97.86),
    "maxgain": Number(97.22),
    "maxgain+dropout": Number(97.89),
    "maxgain+batchnorm": Number(97.31),
    "maxgain+batchnorm+dropout": Number(97.98),
}
"""A network like VGG, 604,388 training images. One run each."""
SINS10: Table = {
    "batchnorm": Number(70.13, 0.27),
    "batchnorm+dropout": Number(74.81, 0.49),
    "maxgain+batchnorm": Number(70.65, 0.54),
    "maxgain+batchnorm+dropout": Number(74.80, 0.51),
}
"""A wide residual network of width 4. Means and standard errors of ten folds."""
SINS10_P_VALUES = {
    ("maxgain+batchnorm", "batchnorm"): 0.332,
    ("maxgain+batchnorm+dropout", "batchnorm+dropout"): 0.976,
}
"""Of the paper's paired t-tests: neither is significant."""

LIPSCHITZ: Table = {"lipschitz-1": Number(89.38), "lipschitz-inf": Number(88.90)}
"""CIFAR-10 rows that are in the paper's source and not in the paper: they are commented out."""


@dataclass(frozen=True)
class Curve:
    """Figure 3: what each γ came to on SVHN, on the training and on the test images."""

    gammas: tuple[float, ...]
    train_accuracy: tuple[float, ...]
    test_accuracy: tuple[float, ...]
    train_loss: tuple[float, ...]
    test_loss: tuple[float, ...]


GAMMA_CURVE = Curve(
    gammas=(1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0),
    train_accuracy=(96.97, 98.73, 99.39, 99.81, 99.91, 99.94, 99.95, 99.96),
    test_accuracy=(94.66, 96.78, 97.22, 97.03, 96.82, 97.05, 96.97, 97.01),
    train_loss=(0.1100, 0.0515, 0.0294, 0.0122, 0.0057, 0.0039, 0.0039, 0.0044),
    test_loss=(0.1994, 0.1283, 0.1119, 0.1331, 0.1616, 0.1664, 0.1826, 0.1985),
)


def _boxes(numbers: str) -> tuple[Box, ...]:
    """A box per line; the first layer is the first."""
    return tuple(tuple(map(float, line.split())) for line in numbers.strip().splitlines())


GAINS: dict[str, dict[str, tuple[Box, ...]]] = {
    "maxgain": {
        "train": _boxes("""
            0.677702 1.02273 1.14229 1.27767 1.98433
            1.07535 1.56179 1.62464 1.67877 1.97424
            1.2517 1.53586 1.56826 1.60264 1.95887
            1.53695 1.69602 1.72788 1.76091 1.966
            1.50031 1.71131 1.74332 1.77376 1.95688
            1.56144 1.73534 1.766 1.79851 1.95974
            1.55557 1.74956 1.78348 1.81774 1.98079
            1.44177 1.61305 1.64837 1.68558 1.90585
            1.11658 1.47229 1.54759 1.62574 1.99555
            0.636813 1.15181 1.32923 1.52394 1.99527
            0.881279 1.53776 1.63056 1.71793 1.99434
            1.08527 1.58477 1.68933 1.7679 1.99853
            1.03073 1.72257 1.79519 1.85026 2.00625
            1.12211 1.74314 1.80069 1.85483 2.00315
            1.23495 1.77204 1.82861 1.87338 2.00312
            1.75902 1.79513 1.82462 1.84252 1.9387
            1.78977 1.88346 1.89965 1.93575 1.99187
            1.85915 1.88674 1.90135 1.92383 1.99747
            1.39316 1.55465 1.57633 1.62991 1.87708
        """),
        "test": _boxes("""
            0.69029 1.02502 1.14527 1.28005 1.8844
            1.1316 1.56258 1.62559 1.6809 1.93864
            1.2849 1.53629 1.56834 1.60412 1.93309
            1.5823 1.69679 1.72895 1.76172 1.9554
            1.51389 1.71185 1.74314 1.77364 1.95894
            1.59058 1.73488 1.76649 1.79958 1.94977
            1.61323 1.74826 1.78273 1.81798 1.94061
            1.45417 1.61338 1.64914 1.68602 1.88513
            1.13179 1.46763 1.54387 1.62511 1.90829
            0.646588 1.09713 1.30664 1.51236 1.99214
            0.77531 1.47084 1.60784 1.70586 1.98885
            1.04508 1.52691 1.67067 1.75977 1.99983
            0.808782 1.6466 1.78039 1.8398 1.99795
            0.838761 1.68877 1.78969 1.84657 1.99778
            1.0238 1.72217 1.8041 1.86533 2.00058
            1.76105 1.79847 1.8307 1.85009 1.95126
            1.79144 1.88552 1.90063 1.93384 1.9931
            1.86031 1.88794 1.90451 1.93322 1.99527
            1.28614 1.55494 1.57718 1.63269 1.87755
        """),
    },
    "none": {
        "train": _boxes("""
            2.52169 3.28163 3.57834 3.93879 5.59682
            1.65469 2.05956 2.14348 2.20962 2.50632
            2.30407 2.69645 2.74835 2.79946 3.42133
            2.74791 3.05068 3.11868 3.19985 3.70411
            2.96137 3.78047 3.87605 3.96503 4.38377
            3.5516 3.92368 4.00042 4.08204 4.59311
            3.29188 3.67751 3.75173 3.82773 4.19119
            4.26828 4.65193 4.73502 4.82277 5.32202
            3.39228 4.47612 4.59602 4.71269 5.20644
            3.83426 4.44956 4.58876 4.73416 5.34594
            3.38404 3.98575 4.13504 4.32864 5.13916
            4.15886 5.07691 5.30238 5.54489 6.43874
            2.83123 3.91162 4.07409 4.28907 4.97209
            3.72364 4.86274 5.04945 5.1644 5.68575
            4.22108 4.64694 4.70882 4.7799 5.07761
            3.0198 4.20194 4.31614 4.42426 4.81512
            2.68559 2.8484 2.91192 2.94902 3.0918
            2.20827 2.26556 2.32084 2.34798 2.53656
            0.632028 0.700401 0.745763 0.775047 1.00733
        """),
        "test": _boxes("""
            2.5475 3.28589 3.58714 3.94489 5.4721
            1.67928 2.06372 2.14516 2.21147 2.48877
            2.38217 2.69633 2.74821 2.80115 3.33735
            2.81122 3.05209 3.12129 3.20137 3.61017
            2.93221 3.77879 3.87601 3.96342 4.40939
            3.59801 3.92334 4.00085 4.0831 4.59806
            3.29362 3.67708 3.75081 3.82732 4.13868
            4.34524 4.65163 4.73482 4.82127 5.28756
            3.69036 4.47328 4.59654 4.7106 5.26118
            3.86148 4.44476 4.58368 4.73012 5.39171
            3.45914 3.96988 4.12194 4.32272 5.16709
            4.2961 5.03523 5.27955 5.53722 6.41517
            2.73015 3.82935 4.02504 4.23867 4.99853
            3.47208 4.78354 4.99388 5.13426 5.6276
            4.25957 4.63938 4.69898 4.77291 5.07724
            3.06113 4.18597 4.30993 4.42658 5.16426
            2.68889 2.85118 2.91219 2.95068 3.10132
            2.2057 2.28961 2.32911 2.3653 2.57379
            0.632601 0.722784 0.760212 0.81725 1.06442
        """),
    },
}
"""Figures 1 and 2: the gains in the 19 layers of VGG-19 on CIFAR-10, under γ = 2 and without a regulariser."""
GAINS_GAMMA = 2.0
