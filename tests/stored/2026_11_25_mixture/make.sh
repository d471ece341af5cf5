#!/bin/sh
# What made this folder, at commit 50d84e2: TREE=path/to/megasharp PYTHON=path/to/python sh make.sh, in an empty folder.
# It is kept to be read: made by later code the files would prove nothing.
set -eu
export PYTHONPATH="$TREE" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
megasharp() { "$PYTHON" -m megasharp.cli "$@"; }

# The model and the problems of numbers are those of 2026_11_22.
cp -r "$TREE/tests/stored/2026_11_22/model" "$TREE/tests/stored/2026_11_22/train.jsonl" .
for number in 1 2 3 4 5 6 7; do
  echo "{\"sum\": \"$number $number=\", \"answer\": \"$((2 * number))\"}"
done > rows.jsonl
cat > judging.py <<'PYTHON_END'
def brief(text, answer):
    return 1.0 if len(text) < len(answer) + 3 else 0.25
PYTHON_END
cat > mixture.yaml <<'YAML_END'
name: mixture
seed: 3
steps: 6
deterministic: true
model: {path: model}
policy: {optimizer: {lr: 1.0e-3}}
data:
  mix:
    - {source: numbers, task: countdown, path: train.jsonl, size: 12, weight: 3}
    - {source: own, path: rows.jsonl, prompt_key: sum, answer_key: answer, weight: 1, reward: "judging.py:brief",
       max_response_tokens: 5, responses_per_prompt: 2}
  stages: [{until: 2, max_response_tokens: 6, weights: {numbers: 1, own: 1}, responses_per_prompt: 3}]
  prompts_per_step: 4
  responses_per_prompt: 4
  max_prompt_tokens: 8
  max_response_tokens: 8
recipe: {methods: [grpo, dynamic_sampling]}
reward: {workers: 0}
checkpoint: {every: 4, keep_last: 1}
eval: {every: 0, suites: []}
log: {tensorboard: false}
YAML_END

# The run that the tests go on with: four of its six steps.
megasharp train mixture.yaml steps=4
# Pictures are drawn anew, and a lock is of its time.
find . -name '*.png' -delete
find . -name .lock -delete
find . -name __pycache__ -exec rm -r {} +
