"""Figures 1 and 2: the gains in the 19 layers of VGG-19 on CIFAR-10, on training and on test images.

Claim: constraining the gain on training images also constrains it on test images; without the constraint, gains are
larger and differ more from layer to layer.
Command: maxgain reproduce gains --data DIR --per-gpu 4
The paper: under γ = 2 the largest gain is 2.006 on training images and 2.0006 on test images, and layers' medians lie
between 1.14 and 1.90; without, medians lie between 0.75 and 5.30. All quantiles are in maxgain.study.reproduce.paper.
Runs: 10, two rows with five seeds; those that are rows of the CIFAR-10 table are not trained twice.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "gains", *sys.argv[1:]]))
