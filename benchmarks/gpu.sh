#!/bin/bash
# All that a GPU is asked for: the kernels' tests, while all networks at once fill the compiler's caches; then the bench,
# which times each network alone and keeps it as it ends.
# bash benchmarks/gpu.sh OUT [folders with packages that are not installed]
out=$(realpath ${1:?where to write})
export PYTHONPATH=src:$2 PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/tmp/inductor TRITON_CACHE_DIR=/tmp/triton
mapfile -t names < <(python3 -c "from benchmarks.networks import ON_GPU; print(*ON_GPU, sep='\n')")
for name in "${names[@]}"; do
  python3 -m benchmarks --networks "$name" --seconds 0 --out "/tmp/unused/$name" >/dev/null 2>&1 &
done
python3 -m pytest -q -p no:cacheprovider tests/promises/test_cuda.py tests/kernels/test_m*.py 2>&1 | tail -n 30 > $out/tests.log
tail -n 1 $out/tests.log
wait
python3 -m benchmarks --out $out --profile ResNet-50 ConvNeXt-T ViT-B 2>&1 | tee $out/bench.log
