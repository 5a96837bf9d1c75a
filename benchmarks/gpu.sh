#!/bin/bash
# All that a GPU is asked for, in one run: whether early launches work, the bench with profiles, then the tests.
# bash benchmarks/gpu.sh OUT [minutes of the bench]
set -o pipefail
out=${1:?where to write}
export PYTHONPATH=src:${BENCH_PACKAGES:-packages} PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
tests="python -m pytest -q -p no:cacheprovider tests/promises/test_cuda.py"
if ! timeout 90 $tests -k "captured or replayed_as or permuted" 2>&1 | tee $out/smoke.log; then
    echo "early launches do not work"
    export MAXGAIN_EARLY=0
fi
beside=("late launches:MAXGAIN_EARLY=0")
[ -d .before ] && beside+=("shared launches:PYTHONPATH=.before/src:${BENCH_PACKAGES:-packages}")
python -m benchmarks --minutes ${2:-5.5} --seconds 4 --out $out --beside "${beside[@]}" \
    --profile ConvNeXt-T Swin-T "GPT-2, 124M" ViT-B ResNet-50 VGG-19 2>&1 | tee $out/bench.log
timeout 120 $tests tests/kernels $(python -c "import xdist" 2>/dev/null && echo -n 8) 2>&1 | tail -40 | tee $out/tests.log
