#!/bin/sh
# What made this folder, at commit 79921dd: TREE=path/to/megasharp PYTHON=path/to/python sh make.sh, in an empty folder.
# It is kept to be read: made by later code the files would prove nothing.
set -eu
export PYTHONPATH="$TREE" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
megasharp() { "$PYTHON" -m megasharp.cli "$@"; }

# Models and problems are those of 2026_11_22.
for name in model memory train.jsonl dev.jsonl dev.yaml; do
  cp -r "$TREE/tests/stored/2026_11_22/$name" .
done
cat > run.yaml <<'YAML_END'
name: old
seed: 3
steps: 6
deterministic: true
model: {path: model}
policy: {optimizer: {lr: 1.0e-3}}
data:
  {task: countdown, path: train.jsonl, prompts_per_step: 4, responses_per_prompt: 4, max_prompt_tokens: 8,
   max_response_tokens: 8, stages: [{until: 3, max_response_tokens: 6}]}
recipe:
  methods: [grpo, kl, dlc]
  mini_batches: 2
  reset: {every: 3}
  dlc: {mu: 0.2, memory: {path: memory}}
checkpoint: {every: 4, keep_last: 1, keep_best: eval/dev/pass@1}
eval: {every: 4, suites: [dev.yaml], n: 4, k: [1, 4], probe: 2}
log: {tensorboard: false, rollouts: {tokens: 256}}
YAML_END

# The run that the tests go on with: four of its six steps, and one evaluation by hand.
megasharp train run.yaml steps=4
megasharp eval runs/old --suite dev.yaml --n 4 --k 1,4
megasharp convert hf-to-megatron model megatron
# What only engines that sample ahead, and an evaluation that was cut off, leave behind: by the functions that write it.
"$PYTHON" - <<'PYTHON_END'
from pathlib import Path
import torch
from megasharp.checkpoint.rollout_store import write_unfinished
from megasharp.common.records import Completion, FinishReason, Outcome, VersionSpan
from megasharp.evals.evaluate import Progress
from megasharp.evals.samples import Sample, TokenFigures
from megasharp.rollout.in_flight import SampledWith, Unfinished

logp = torch.tensor([-0.5, -1.0 / 3.0, -1e-30])
spans = (VersionSpan(3, 0, 1), VersionSpan(4, 1, 3))
response = Completion(torch.tensor([5, 6, 1]), logp, 2 * logp, None, spans, FinishReason.STOP, 2**63 - 1)
parts = Path("parts")
parts.mkdir()
write_unfinished(parts, [Unfinished(1, 5, (response, None), (1,), SampledWith(12, memory=False))])
sample = Sample(0, Outcome.CORRECT, "1+2", 5, False, TokenFigures(0.5, 0.6, (-0.5,), -0.6))
Progress(parts / "dev.samples", {"weights": "w"}).write("chunk_0", [sample], 1.5)
PYTHON_END
# Pictures are drawn anew, and a lock is of its time.
find . -name '*.png' -delete
find . -name .lock -delete
