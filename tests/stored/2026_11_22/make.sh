#!/bin/sh
# What made this folder, at commit 83ca94b: TREE=path/to/megasharp PYTHON=path/to/python sh make.sh, in an empty folder.
# It is kept to be read: made by later code the files would prove nothing.
set -eu
export PYTHONPATH="$TREE" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= HF_HUB_OFFLINE=1
megasharp() { "$PYTHON" -m megasharp.cli "$@"; }

# Two tiny models that can add two digits a little, and their problems.
"$PYTHON" - "$TREE/examples/quickstart/base" <<'PYTHON_END'
import json, random, shutil, sys
from pathlib import Path
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

base = Path(sys.argv[1])
vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
pairs = [(a, b) for a in range(1, 9) for b in range(1, 10 - a)]
texts = [[vocabulary[c] for c in f"{a} {b}={a + b}:{a}+{b}"] + [1] for a, b in pairs]
for seed, name, hidden in ((1, "model", 16), (2, "memory", 8)):
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=22, hidden_size=hidden, intermediate_size=hidden, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=None, eos_token_id=1, use_cache=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.tensor(texts)
    for _ in range(38):
        loss = torch.nn.functional.cross_entropy(model(tokens).logits[:, 5:-1].flatten(0, 1), tokens[:, 6:].flatten())
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    print(name, loss.item(), sum(p.numel() for p in model.parameters()))
    model.save_pretrained(name)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(base / file, name)
random.seed(1); random.shuffle(pairs)
rows = [{"id": f"sum-{a}{b}", "numbers": [a, b], "target": a + b} for a, b in pairs]
for name, part in (("train", rows[:24]), ("dev", rows[24:])):
    Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
Path("dev.yaml").write_text("task: countdown\npath: dev.jsonl\n")
PYTHON_END

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
eval: {every: 4, suites: [dev.yaml], n: 4, k: [1, 4]}
log: {tensorboard: false}
YAML_END
cat > lora.yaml <<'YAML_END'
include: [run.yaml]
name: lora
steps: 2
policy: {lora: {rank: 2}}
recipe: {methods: [grpo]}
eval: {every: 0, suites: []}
checkpoint: {every: 2, keep_best: null}
log: {rollouts: false}
YAML_END

# The runs that the tests go on with, and one evaluation by hand.
megasharp train run.yaml steps=4
megasharp train lora.yaml
megasharp eval runs/old --suite dev.yaml --n 4 --k 1,4
# Pictures are drawn anew, and a lock is of its time.
find . -name '*.png' -delete
find . -name .lock -delete
