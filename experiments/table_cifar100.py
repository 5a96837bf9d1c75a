"""CIFAR-100, WRN-16-4: the second table of the paper.

Claim: MaxGain helps on top of batch norm, and of batch norm and dropout, in a residual network.
Command: maxgain reproduce cifar100 --data DIR --per-gpu 4
The paper, accuracy in %, one run each: batchnorm 75.34, batchnorm+dropout 75.72, maxgain+batchnorm 75.89,
maxgain+batchnorm+dropout 76.44.
Runs: 10 that choose γ on validation images, then 20: four rows, five seeds.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "cifar100", *sys.argv[1:]]))
