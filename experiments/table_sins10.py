"""SINS-10's protocol, WRN-16-4: the last table of the paper, on a stand-in for its data.

Claim: on ten disjoint folds neither difference that MaxGain makes is significant.
Command: maxgain reproduce sins10 --data DIR --per-gpu 4
The paper, accuracy in %, mean and standard error of ten folds: batchnorm 70.13 ± 0.27, batchnorm+dropout 74.81 ± 0.49,
maxgain+batchnorm 70.65 ± 0.54, maxgain+batchnorm+dropout 74.80 ± 0.51; paired t-tests p = 0.332 and p = 0.976.
Data: X.bin and y.bin in SINS-10's layout in DIR/sins10, or a stand-in of the same layout in DIR/imagenette-folds. Folds
may be smaller than SINS-10's, and then accuracies are not comparable with the paper's.
Runs: 100 that choose γ on every fold's validation images, then 40: four rows, ten folds.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "sins10", *sys.argv[1:]]))
