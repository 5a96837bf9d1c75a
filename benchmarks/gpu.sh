#!/bin/bash
# All that a GPU is asked for, in one run: the kernels' tests while networks are compiled, then the bench.
# bash benchmarks/gpu.sh OUT [minutes of the bench] [folders with packages that are not installed]
set -o pipefail
out=${1:?where to write}
export PYTHONPATH=src:$3 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
timeout 150 python -m pytest -q -p no:cacheprovider -x tests/promises/test_cuda.py tests/kernels > $out/tests.log 2>&1 &
tests=$!
timeout 330 python -m benchmarks --minutes ${2:-3.2} --seconds 3 --out $out --profile VGG-19 ResNet-50 ViT-B \
    --uncaptured "VGG-19 with batch norm" "GPT-2, 124M" ResNet-50 ConvNeXt-T 2>&1 | tee $out/bench.log
kill $tests 2>/dev/null
tail -5 $out/tests.log
