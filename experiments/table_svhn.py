"""SVHN, a network like VGG: the third table of the paper, four of its eight rows.

Claim: MaxGain helps on its own, and on top of batch norm and dropout.
Command: maxgain reproduce svhn --data DIR --per-gpu 4
The paper, accuracy in %, one run each, with 604,388 training images: none 96.99, batchnorm+dropout 97.86, maxgain
97.22, maxgain+batchnorm+dropout 97.98. Here there are 73,257 training images: `extra` cannot be obtained. The number of
steps is the paper's: 138 epochs instead of 17, with the lower learning rate in the last two seventeenths.
Runs: 10 that choose γ on validation images, then 12: four rows, three seeds.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "svhn", *sys.argv[1:]]))
