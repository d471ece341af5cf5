#!/bin/sh
# What made this folder, at the commit that added it: TREE=path/to/megasharp PYTHON=path/to/python sh make.sh, in an
# empty folder. It is kept to be read: made by later code the files would prove nothing.
set -eu
export PYTHONPATH="$TREE" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1

# Model and problems are those of 2026_11_24_format_2.
for name in model dev.jsonl dev.yaml; do
  cp -r "$TREE/tests/stored/2026_11_24_format_2/$name" .
done
"$PYTHON" -m megasharp.cli eval model --suite dev.yaml --n 4 --k 1,4 --keep tokens --out evals
rm -r model dev.jsonl dev.yaml evals/.lock
