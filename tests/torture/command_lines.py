"""Command lines that somebody might type, or a script might build, and that have something wrong with them."""

import random
from collections.abc import Iterator
from pathlib import Path

NUMBERS = (
    *("-1", "0", "1", "-0", "1.5", "nan", "-nan", "inf", "-inf", "1e999", "1e-999", "1e308", "-1e308", "5e-324"),
    *("9" * 25, "9" * 400, "-" + "9" * 25, str(2**31), str(2**32), str(2**63), str(2**64), "1_000", "0x10", "1,5"),
    *(
        "١",
        "½",
        "²",
        "",
        " ",
        "x",
        "True",
        "None",
        "[]",
        "{}",
        "1 2",
        "--1",
        "+1",
        "1e",
        "e1",
        ".",
        "1/3",
        "%s",
        "$(id)",
    ),
)
TEXTS = (
    *("", " ", "-", "--", "---", "=", "+", "*", "?", "[", "[a", "..", "../..", "/", "\\", "'", '"', "%", "%s", "{0}"),
    *("\n", "\t", "\x1b[31m", "\x07", "a\nb", "\udcff", "é", "名", "😀", "\u202e", "x" * 300, "x" * 5000),
    *("<script>", "$HOME", "$(id)", "`id`", "; id", "| id", "&", "None", "null", "nan", "inf", "0", "-1"),
)
REGULARISERS = (
    *("maxgian", "maxgain=", "maxgain==2", "maxgain=-1", "maxgain=0", "maxgain=nan", "maxgain=x", "maxgain=1e999"),
    *("maxgain+maxgain", "maxgain=1+maxgain=2", "none+none", "none+dropout", "+maxgain", "maxgain+", "++", "dropout=2"),
    *(
        "dropout=-0.1",
        "dropout=1",
        "batchnorm=3",
        "none=1",
        "MAXGAIN",
        " maxgain ",
        "maxgain,dropout",
        "maxgain dropout",
    ),
    *(
        "lipschitz1",
        "lipschitz3",
        "gradpenalty+batchnorm",
        "spectral",
        "weightdecay=-1",
        "maxgain=1e-320",
        "maxgain=inf",
    ),
)
GRIDS = (
    *("gamma", "gamma=", "gamma=1", "gamma=1:2", "gamma=1:2:0", "gamma=1:2:-1", "gamma=2:1:0.5", "gamma=1:2:1e-9"),
    *("gamma=1:1e300:1", "gamma=nan:2:1", "gamma=1:inf:1", "gamma=1:2:nan", "gamma=0:1:0.5", "gamma=-1:1:1", "=1:2:1"),
    *(
        "gamm=1:2:1",
        "gamma=1:2:0.5:3",
        "gamma=a:b:c",
        "gamma=1e-300:1e300:1e-300",
        "dropout=0:2:0.5",
        "gamma=1:2:1e-300",
    ),
)
SHAPES = (
    "",
    "x",
    "3x",
    "3x32x",
    "-3x32x32",
    "0x8x8",
    "1e3",
    "3x32x32x32x32",
    "99999x99999x99999",
    "3 32 32",
    "2x2",
    "nan",
)
MODELS = (
    *("", ":", "torch", "torch:", ":Linear", "nowhere:x", "torch.nn:Linear", "os:getcwd", "sys:exit", "json:loads"),
    *(
        "math:pi",
        "torch.nn:nowhere",
        "a b:c",
        "..:x",
        ".x:y",
        "torch.nn:Sequential",
        "builtins:exit",
        "builtins:object",
    ),
    *("maxgain.study.cli.app:main", "torture.models:raises", "torture.models:exits", "torture.models:nothing"),
    *("torture.models:not_a_number", "torture.models:greedy", "torture.models:needs_arguments", "torture.models:odd"),
)

# What a command needs to be right, and what may follow each of its flags.
RECIPE_FLAGS = {
    "dataset": TEXTS,
    "network": TEXTS,
    "optimiser": TEXTS,
    "learning-rate": NUMBERS,
    "epochs": NUMBERS,
    "batch-size": NUMBERS,
    "milestones": NUMBERS,
    "decay": NUMBERS,
    "weight-decay": NUMBERS,
    "train-on": TEXTS,
    "gamma": NUMBERS,
    "p": NUMBERS,
    "measure": TEXTS,
    "seed": NUMBERS,
    "fold": NUMBERS,
    "cross-validation": NUMBERS,
    "image-size": NUMBERS,
    "device": TEXTS,
}
FAST = ["digits", "--network", "mlp", "--fold", "0", "--epochs", "1"]


def paths(place: Path) -> tuple[str, ...]:
    """Names of files and folders that are not what they should be; all that can be written to is under `place`."""
    special = ("pipe", "loop", "zero", "file", "empty", "file/below", "foreign", "nowhere/at/all", "x" * 300, "\udcff")
    return (
        *(str(place / name) for name in special),
        *("/nowhere", "/dev/null", "/dev/zero", "/dev/null/x", "/proc/self/mem", "/proc/1", "~nobody-there"),
        *("~nobody-there/x", "$HOME/nowhere", str(place / "a\nb"), str(place / "'quoted'"), f"{place}/../{place.name}"),
    )


def commands(place: Path) -> dict[str, tuple[list[str], dict[str, tuple[str, ...]]]]:
    """By name: a command line that works, in a hurry, and the bad values of its flags."""
    somewhere = paths(place)
    files = {"data": somewhere, "out": somewhere}
    trained = RECIPE_FLAGS | files | {"regulariser": REGULARISERS}
    return {
        "train": (["train", *FAST], trained | {"checkpoint-seconds": NUMBERS}),
        "tune": (
            ["tune", *FAST, "--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--jobs", "1"],
            trained | {"grid": GRIDS, "trials": NUMBERS, "jobs": NUMBERS, "storage": TEXTS},
        ),
        "compare": (
            ["compare", *FAST[:3], "--epochs", "1", "--regularisers", "none", "maxgain", "--folds", "2", "--jobs", "1"],
            RECIPE_FLAGS
            | files
            | {"regularisers": REGULARISERS, "baseline": REGULARISERS, "folds": NUMBERS, "seeds": NUMBERS}
            | {"grid": GRIDS, "jobs": NUMBERS},
        ),
        "gains": (["gains", str(place / "run")], {"data": somewhere, "device": TEXTS}),
        "inspect": (
            ["inspect", "--model", "torture.models:small", "--input", "3x4x4"],
            files | {"model": MODELS, "input": SHAPES, "exclude": TEXTS, "device": TEXTS},
        ),
        "report": (["report", str(place / "comparison")], {"out": somewhere, "baseline": REGULARISERS}),
        "demo": (["demo"], {"jobs": NUMBERS, "device": TEXTS, "out": somewhere}),
        "data": (["data", "check", "cifar10"], {"data": somewhere}),
        "data list": (["data", "list"], {"data": somewhere}),
        "data build-sins10": (
            ["data", "build-sins10", str(place), str(place / "file")],
            {"data": somewhere, "per-class": NUMBERS, "seed": NUMBERS},
        ),
    }


def bad(place: Path, seed: int, count: int) -> Iterator[list[str]]:
    """Command lines with one to three things wrong with them; the same for the same seed."""
    chance = random.Random(seed)
    known = commands(place)
    for number in range(count):
        line, flags = known[list(known)[number % len(known)]]
        words = list(line)
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            words = _spoilt(words, flags, chance)
        yield words


def _spoilt(words: list[str], flags: dict[str, tuple[str, ...]], chance: random.Random) -> list[str]:
    flag = chance.choice(list(flags))
    value = chance.choice(flags[flag])
    kind = chance.randrange(12)
    at = chance.randrange(1, len(words) + 1)
    if kind < 6:
        return [*_without(words, f"--{flag}"), f"--{flag}", value]
    if kind == 6:
        return [*words, f"--{flag}={value}"]
    if kind == 7:
        return [*words, f"--{flag}"]
    if kind == 8:
        return [*words, f"--{_misspelt(flag, chance)}", value]
    if kind == 9:
        return [*words[:at], chance.choice(TEXTS), *words[at:]]
    if kind == 10:
        return words[:at] + words[at + 1 :]
    return [*words[:at], chance.choice(("--json", "--help", "--nonsense", "-x", "--no-json", "-1")), *words[at:]]


def _without(words: list[str], flag: str) -> list[str]:
    """The words without that flag and its value."""
    if flag not in words:
        return words
    at = words.index(flag)
    return words[:at] + words[at + 2 :]


def _misspelt(flag: str, chance: random.Random) -> str:
    at = chance.randrange(len(flag))
    return chance.choice((flag[:at] + flag[at + 1 :], flag[: at + 1] + flag[at:], flag.upper(), flag + "s", flag[:2]))
