#!/bin/bash
# All that a GPU is asked for: the kernels' tests, while all networks are compiled; then the bench, which times each
# network alone and keeps it as it ends, but not before FILE is there, where other work comes first.
# bash benchmarks/gpu.sh OUT [folders with packages that are not installed] [FILE] [options of the bench]
out=$(realpath ${1:?where to write}) quiet=${3:-$(mktemp -u)}
export PYTHONPATH=src:$2 PYTHONUNBUFFERED=1 TORCHINDUCTOR_COMPILE_THREADS=2
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-/tmp/triton}
python3 -m benchmarks --out $out --after $quiet "${@:4}" >$out/bench.log 2>&1 &
for file in tests/promises/test_cuda.py tests/kernels/test_m*.py; do
  python3 -m pytest -q -p no:cacheprovider $file 2>&1 | tail -n 30 >$out/$(basename $file .py).log &
  tests+=($!)
done
wait ${tests[@]}
tail -qn 1 $out/test_*.log
[ "$3" ] || touch $quiet
wait
cat $out/bench.log
