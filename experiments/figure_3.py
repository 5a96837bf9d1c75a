"""Figure 3: accuracy and log loss against γ, SVHN.

Claim: a small γ underfits; as γ grows the training loss goes to zero, while the loss on other images falls and rises.
Command: maxgain reproduce gamma-curve --data DIR --per-gpu 4
The paper: from γ = 1.25 to 3 the training loss goes from 0.110 to 0.004; the test loss is least at γ = 1.75, with
0.112, and test accuracy is highest there, 97.22 %. Here the curve is on validation images.
Runs: 8, one per γ; five of them also choose γ for the SVHN table and are not trained twice.
Hardware: one GPU. Duration: REPRODUCTION.md tells what the recorded runs took, and --dry-run what is left.

This file does what the command does, and takes its options.
"""

import sys

from maxgain.study.cli.app import main

if __name__ == "__main__":
    sys.exit(main(["reproduce", "gamma-curve", *sys.argv[1:]]))
