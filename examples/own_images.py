"""Does MaxGain help on your own images? Compare it with no regulariser and with weight decay, on a CPU.

    python examples/own_images.py PHOTOS     # one folder of images per class, or train/ and test/ with such folders
    python examples/own_images.py            # none at hand: handwritten digits as PNG files, a third of the training
                                             # images in a wrong folder

Numbers are chosen on validation images; the test images are scored once. The same on the command line:

    maxgain compare folder --data PHOTOS --rows none weightdecay maxgain --tuned grid --folds 5 --out runs/photos
"""

import argparse
import logging
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from maxgain.study import Machine, compare, page

GRID = {"maxgain": (1.25, 1, 1.5, 2), "weightdecay": (0.01, 0.003, 0.03, 0.1)}


def write_digits(folder: Path, count: int) -> None:
    """Write scanned digits as PNG files: what a folder of your own looks like."""
    digits, generator = load_digits(), np.random.default_rng(0)
    for number, (pixels, label) in enumerate(zip(digits.images[:count], digits.target, strict=False)):
        part = "test" if number % 2 else "train"
        is_wrong = part == "train" and generator.random() < 1 / 3
        place = folder / part / f"digit{generator.integers(10) if is_wrong else label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15.9).astype("uint8")).save(place / f"{number}.png")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="your images")
    parser.add_argument("--size", type=int, default=16, help="side to which images are resized, in pixels")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, help="runs at once (default: one per core)")
    parser.add_argument("--images", type=int, default=1797, help="how many digits to write, without a folder")
    parser.add_argument("--out", type=Path, default=Path("runs/own-images"))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with tempfile.TemporaryDirectory() as made:
        if options.folder is None:
            write_digits(Path(made), options.images)
        comparison = compare(
            "folder",
            ["none", "weightdecay", "maxgain"],
            seeds=options.seeds,
            tuned="grid",
            grid=GRID,
            budget=4,
            root=options.folder or Path(made),
            out=options.out,
            image_size=options.size,
            epochs=options.epochs,
            milestones=(),
            augment=False,
            machine=Machine(device="cpu", jobs=options.jobs),
        )
    print(comparison)
    print(f"open in a browser: {page(options.out, options.out / 'report.html').absolute().as_uri()}")


if __name__ == "__main__":
    main()
