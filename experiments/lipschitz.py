"""Lipschitz rows on CIFAR-10, VGG-19: bounds for all inputs there could be, beside MaxGain.

Claim: a bound on a layer's operator norm regularises too.
Command: maxgain reproduce lipschitz --data DIR --per-gpu 4
The paper, accuracy in %, one run each: none 88.29, maxgain 90.75; in its source, commented out: lipschitz-1 89.38,
lipschitz-inf 88.90. There is no number for lipschitz-2.
Runs: 20 that choose γ or λ on validation images, then 15: five rows, three seeds; `none` and `maxgain` are runs of the
CIFAR-10 table and are not trained twice.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "lipschitz", *sys.argv[1:]]))
