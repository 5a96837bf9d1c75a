#!/bin/bash
# All that a GPU is asked for, in one run of at most 270 s: the bench, then the kernels' tests, as far as they come.
# bash benchmarks/gpu.sh OUT [folders with packages that are not installed]
began=$SECONDS
out=${1:?where to write}
export PYTHONPATH=src:$2 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton
timeout 240 python -m benchmarks --out $out --prepare 135 --limit 215 --seconds 2 --profile ResNet-50 ConvNeXt-T ViT-B \
    --rare "GPT-2, 124M" "VGG-19 with batch norm" --networks Swin-T ConvNeXt-T ResNet-50 ViT-B "GPT-2, 124M" VGG-19 \
    "VGG-19 with batch norm" > $out/bench.log 2>&1
left=$((265 - SECONDS + began))
for part in tests/promises/test_cuda.py tests/kernels/test_multi_layer.py tests/kernels/test_measuring.py; do
    timeout $left python -m pytest -q -p no:cacheprovider $part > /tmp/$(basename $part).log 2>&1 &
done
wait
tail -n 30 /tmp/test_cuda.py.log /tmp/test_multi_layer.py.log /tmp/test_measuring.py.log > $out/tests.log
tail -n 25 $out/bench.log
tail -n 1 /tmp/test_cuda.py.log /tmp/test_multi_layer.py.log /tmp/test_measuring.py.log
