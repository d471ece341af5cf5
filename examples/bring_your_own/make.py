"""Write what the example needs: two small chat models with random weights, and a data set of little word problems.

    python make.py

makes qwen and llama, folders as the hub has them, and problems with train.jsonl and test.jsonl. Both
tokenizers are byte-level BPE, trained on the problems; qwen speaks ChatML and ends with <|im_end|>, llama begins with
<|begin_of_text|> and ends its turns with <|eot_id|>. The same seed writes the same files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA_TOKENS = [
    "<|begin_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def problems(count: int, seed: int) -> list[dict[str, object]]:
    """Draw word problems, with their answers and levels."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        name, thing = draw.choice(["Ada", "Ben", "Cleo", "Dan"]), draw.choice(["apples", "books", "coins", "stamps"])
        level = draw.choice([1, 2])
        a, b = (draw.randint(1, 9 * level) for _ in range(2))
        question = f"{name} has {a} {thing} and finds {b} more. How many {thing} has {name} now?"
        rows.append({"question": question, "answer": a + b, "level": level})
    return rows


def tokenizer(texts: list[str], special: list[str], template: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts; the last special token ends an answer."""
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rules.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    begin = special[0] if special is LLAMA_TOKENS else None
    if begin:
        place = (begin, rules.token_to_id(begin))
        rules.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[place])
    pad = special[1] if begin else special[0]
    made = PreTrainedTokenizerFast(tokenizer_object=rules, bos_token=begin, eos_token=special[-1], pad_token=pad)
    made.chat_template = template
    return made


def main(folder: Path) -> None:
    """Write both models and the data set."""
    data = folder / "problems"
    data.mkdir(parents=True, exist_ok=True)
    splits = {"train": problems(200, seed=1), "test": problems(40, seed=2)}
    for split, rows in splits.items():
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [str(row["question"]) for row in splits["train"]]
    for name, special, template in (("qwen", QWEN_TOKENS, CHATML), ("llama", LLAMA_TOKENS, LLAMA_3)):
        words = tokenizer(texts, special, template)
        words.save_pretrained(folder / name)
        ids = {
            "bos_token_id": words.bos_token_id,
            "eos_token_id": words.eos_token_id,
            "pad_token_id": words.pad_token_id,
        }
        torch.manual_seed(1)
        settings = {**SIZES, **ids, "vocab_size": len(words), "tie_word_embeddings": False}
        if name == "qwen":
            Qwen2ForCausalLM(Qwen2Config(**settings)).save_pretrained(folder / name)
        else:
            LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
