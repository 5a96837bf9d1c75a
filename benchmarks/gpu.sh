#!/bin/bash
# All that a GPU is asked for, in one run of at most 270 s: the bench, then the kernels' tests, as far as they come.
# bash benchmarks/gpu.sh OUT [folders with packages that are not installed]
out=$(realpath ${1:?where to write})
export PYTHONPATH=src:$2 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton
SECONDS=0
timeout 235 python3 -m benchmarks --out $out --prepare 135 --limit 215 --seconds 2 --profile ResNet-50 ConvNeXt-T ViT-B \
    --rare "GPT-2, 124M" "VGG-19 with batch norm" --networks Swin-T ConvNeXt-T ResNet-50 ViT-B "GPT-2, 124M" VGG-19 \
    "VGG-19 with batch norm" > $out/bench.log 2>&1
left=$((265 - SECONDS))
for part in promises/test_cuda kernels/test_multi_layer kernels/test_measuring; do
    timeout $left python3 -m pytest -q -p no:cacheprovider tests/$part.py > /tmp/$(basename $part).log 2>&1 &
done
wait
cd /tmp && tail -n 30 test_cuda.log test_multi_layer.log test_measuring.log > $out/tests.log
tail -n 1 test_cuda.log test_multi_layer.log test_measuring.log
tail -n 25 $out/bench.log
