"""CIFAR-10, VGG-19: the first table of the paper.

Claim: MaxGain helps on its own, and on top of dropout, of batch norm and of both.
Command: maxgain reproduce cifar10 --data DIR --per-gpu 4
The paper, accuracy in %, one run each: none 88.29, dropout 89.71, batchnorm 90.80, batchnorm+dropout 90.90, maxgain
90.75, maxgain+dropout 90.95, maxgain+batchnorm 91.76, maxgain+batchnorm+dropout 91.52.
Runs: 20 that choose γ on validation images, then 40: eight rows, five seeds.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "cifar10", *sys.argv[1:]]))
