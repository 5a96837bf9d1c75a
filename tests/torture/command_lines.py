"""Command lines that somebody might type, or a script might build, and that have something wrong with them."""

import importlib
import random
from collections.abc import Iterator
from pathlib import Path

from maxgain.study.cli import flags

NUMBERS = (
    *("-1", "0", "1", "-0", "1.5", "nan", "-nan", "inf", "-inf", "1e999", "1e-999", "1e308", "-1e308", "5e-324"),
    *("9" * 25, "9" * 400, "-" + "9" * 25, str(2**31), str(2**32), str(2**63), str(2**64), "1_000", "0x10", "1,5"),
    *("١", "½", "²", "", " ", "x", "True", "None", "[]", "{}", "1 2", "--1", "+1", "1e", "e1", ".", "1/3", "%s"),
    "$(id)",
)
TEXTS = (
    *("", " ", "-", "--", "---", "=", "+", "*", "?", "[", "[a", "\\", "'", '"', "%", "%s", "{0}", "9" * 5000),
    *("\n", "\t", "\x1b[31m", "\x07", "a\nb", "\udcff", "é", "名", "😀", "\u202e", "x" * 300, "x" * 5000),
    *("<script>", "$HOME", "$(id)", "`id`", "; id", "| id", "&", "None", "null", "nan", "inf", "0", "-1"),
)
REGULARISERS = (
    *("maxgian", "maxgain=", "maxgain==2", "maxgain=-1", "maxgain=0", "maxgain=nan", "maxgain=x", "maxgain=1e999"),
    *("maxgain+maxgain", "maxgain=1+maxgain=2", "none+none", "none+dropout", "+maxgain", "maxgain+", "++", "dropout=2"),
    *("dropout=-0.1", "dropout=1", "batchnorm=3", "none=1", "MAXGAIN", " maxgain ", "maxgain,dropout"),
    *("maxgain dropout", "lipschitz1", "lipschitz3", "gradpenalty+batchnorm", "spectral", "weightdecay=-1"),
    *("maxgain=1e-320", "maxgain=inf"),
)
GRIDS = (
    *("gamma", "gamma=", "gamma=1", "gamma=1:2", "gamma=1:2:0", "gamma=1:2:-1", "gamma=2:1:0.5", "gamma=1:2:1e-9"),
    *("gamma=1:1e300:1", "gamma=nan:2:1", "gamma=1:inf:1", "gamma=1:2:nan", "gamma=0:1:0.5", "gamma=-1:1:1", "=1:2:1"),
    *("gamm=1:2:1", "gamma=1:2:0.5:3", "gamma=a:b:c", "gamma=1e-300:1e300:1e-300", "dropout=0:2:0.5"),
    "gamma=1:2:1e-300",
)
SHAPES = (
    *("", "x", "3x", "3x32x", "-3x32x32", "0x8x8", "1e3", "3x32x32x32x32", "99999x99999x99999", "3 32 32", "2x2"),
    "nan",
)
MODELS = (
    *("", ":", "torch", "torch:", ":Linear", "nowhere:x", "torch.nn:Linear", "os:getcwd", "sys:exit", "json:loads"),
    *("math:pi", "torch.nn:nowhere", "a b:c", "..:x", ".x:y", "torch.nn:Sequential", "builtins:exit"),
    *("builtins:object", "os:abort", "os:_exit", "faulthandler:_sigsegv", "nowhere:" + "x" * 5000),
    *("maxgain.study.cli.app:main", "torture.models:raises", "torture.models:exits", "torture.models:nothing"),
    *("torture.models:not_a_number", "torture.models:greedy", "torture.models:needs_arguments", "torture.models:odd"),
)
ENGINES = ("ray", "ray", "local", "Ray", "dask", "", "ray ")
ADDRESSES = (
    *("auto", "127.0.0.1:1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:" + "9" * 5000, "127.0.0.1:-1", "127.0.0.1:"),
    *("ray://127.0.0.1:1", "http://127.0.0.1:1", ":6379", "[::1]:1", "[::1", "..:6379", "x" * 5000 + ":1", "\udcff:1"),
    *("127.0.0.1:x", "127.0.0.1:²", "127.0.0.1:١", "a b:1", "\n:1", "", ":", "None"),
)
SHARDS = (
    *("0/1", "0/2", "1/2", "7/8", "1/1", "2/1", "0/0", "-1/2", "0/-2", "1/0", "0", "/", "0/", "/2", "0/2/3", "a/b"),
    *("1.5/2", "0/ 2", "0/1e3", "١/٢", "²/3", "0/" + "9" * 400, "0/" + "9" * 5000, "9" * 5000 + "/1", "0\n/2", "0\\2"),
)

# What may follow a flag; after any other, numbers and texts of all kinds do.
VALUES = {
    "regulariser": REGULARISERS,
    "regularisers": REGULARISERS,
    "baseline": REGULARISERS,
    "contrasts": (*REGULARISERS, "matched", "maxgain:none", "none:none", "a:b:c", ":", "maxgain:"),
    "grid": GRIDS,
    "model": MODELS,
    "input": SHAPES,
    "engine": ENGINES,
    "address": ADDRESSES,
    "shard": SHARDS,
}
PATHS = ("data", "document", "out", "results", "work")
"""The flags that name files and folders: after them follows nothing outside of the test's own folder."""
FAST = ["digits", "--network", "mlp", "--fold", "0", "--epochs", "1"]


def paths(place: Path) -> tuple[str, ...]:
    """Names of files and folders that are not what they should be; all that can be written to is under `place`."""
    special = ("pipe", "loop", "zero", "file", "empty", "file/below", "foreign", "nowhere/at/all", "x" * 300, "\udcff")
    return (
        *(str(place / name) for name in special),
        *("/dev/null", "/dev/zero", "/dev/null/x", "/proc/self/mem", "/proc/1", "~nobody-there"),
        *("~nobody-there/x", "$HOME/nowhere", str(place / "a\nb"), str(place / "'quoted'"), f"{place}/../{place.name}"),
    )


def commands(place: Path) -> list[list[str]]:
    """Command lines that work, in a hurry, at least one of every command; and one for a cluster that is not there."""
    return [
        ["train", *FAST],
        ["tune", *FAST, "--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--jobs", "1"],
        ["tune", *FAST, "--regulariser", "maxgain", "--grid", "gamma=1:2:1", "--jobs", "1", "--shard", "0/2"],
        ["compare", *FAST[:3], "--epochs", "1", "--regularisers", "none", "maxgain", "--folds", "2", "--jobs", "1"],
        ["compare", *FAST[:3], "--regularisers", "none", "--folds", "2", "--engine", "ray", "--address", "127.0.0.1:1"],
        ["gains", str(place / "run")],
        ["inspect", "--model", "torture.models:small", "--input", "3x4x4"],
        ["inspect", str(place / "run")],
        ["report", str(place / "comparison")],
        ["merge", str(place / "merged"), str(place / "comparison" / "results")],
        ["bench", "--device", "cpu", "--turns", "1"],
        ["demo"],
        ["list", "maxgain"],
        ["reproduce", "cifar10", "--dry-run"],
        ["reproduce", "svhn", "--shard", "0/4"],
        ["data", "check", "cifar10"],
        ["data", "list"],
        ["data", "fetch", "svhn"],
        ["data", "build-sins10", str(place), str(place / "file")],
    ]


def flags_of(command: str) -> list[str]:
    """The flags of a command that take a value, read from its options: a new one is tried too."""
    options = importlib.import_module(f"maxgain.study.cli.{command}").Options
    return [name for name in flags.names(options) if name not in ("help", "json") and not name.startswith("no-")]


def bad(place: Path, seed: int, count: int) -> Iterator[list[str]]:
    """Command lines with one to three things wrong with them; the same for the same seed."""
    chance = random.Random(seed)
    known = commands(place)
    values = VALUES | dict.fromkeys(PATHS, paths(place))
    for number in range(count):
        words = known[number % len(known)]
        names = flags_of(words[0])
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            flag = chance.choice(names) if names else "nonsense"
            words = _spoilt(words, flag, chance.choice(values.get(flag, NUMBERS + TEXTS)), chance)
        yield words


def _spoilt(words: list[str], flag: str, value: str, chance: random.Random) -> list[str]:
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
