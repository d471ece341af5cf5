"""Small models made on the spot whose tokenizers have the special tokens and chat templates of well-known families."""

from __future__ import annotations

import json
from pathlib import Path

QWEN = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama 3's it writes the begin-of-text token itself, and the day, by the clock where nobody gives it one.
LLAMA = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}\n\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{{ message.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Shortened templates that write tools, with what matters of the published ones for what stands between turns: Qwen2.5
# puts answers of tools into one message of the user, Qwen3 drops the thinking before a user's last message, Llama 3.1
# puts schemas before the user's first message, and answers into messages of ipython as JSON.
_QWEN_TOOLS = (
    "<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% set last = namespace(user=0) %}{% for message in messages %}"
    "{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' and loop.index0 < KEPT_FROM %}{% set content = content.split('</think>')[-1] %}"
    "{% endif %}{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role != 'system' %}<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL_TEMPLATES = {
    "qwen2.5": _QWEN_TOOLS.replace("KEPT_FROM", "0"),
    "qwen3": _QWEN_TOOLS.replace("KEPT_FROM", "last.user"),
    "llama3.1": (
        "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\n{% if tools %}Environment: ipython\n{% endif %}"
        "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set messages = messages[1:] %}{% endif %}"
        "<|eot_id|>{% for message in messages %}{% if message.role == 'tool' %}<|start_header_id|>ipython"
        "<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>{% else %}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{% if loop.first %}{% for tool in tools %}{{ tool | tojson(indent=4) }}\n\n{% endfor %}{% endif %}"
        "{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
}
_SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


def write_tokenizer(folder: Path, family: str, chat: bool = True) -> Path:
    """Write the tokenizer of a `qwen` or a `llama`, of bytes and special tokens; a base model's has no `chat`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = _SPECIAL[family]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    rules = Tokenizer(models.BPE({text: number for number, text in enumerate([*letters, *special])}, []))
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    rules.add_special_tokens(special)
    begin = special[0] if family == "llama" else None
    if begin:
        rules.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, rules.token_to_id(begin))]
        )
    end = special[-1] if chat else special[1 if begin else 0]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, bos_token=begin, eos_token=end, pad_token=special[0])
    if chat:
        tokenizer.chat_template = QWEN if family == "qwen" else LLAMA
    tokenizer.save_pretrained(folder)
    return folder


def write_model(folder: Path, family: str, chat: bool = True) -> Path:
    """Write such a model with random weights and positions for 1024 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    write_tokenizer(folder, family, chat)
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {**sizes, "num_key_value_heads": 2, "vocab_size": 264, "max_position_embeddings": 1024}
    last = 256 + len(_SPECIAL[family]) - 1
    ends = {"bos_token_id": None, "eos_token_id": last, "pad_token_id": 256, "tie_word_embeddings": False}
    made = (
        Qwen2ForCausalLM(Qwen2Config(**settings, **ends))
        if family == "qwen"
        else LlamaForCausalLM(LlamaConfig(**settings, **ends))
    )
    made.save_pretrained(folder)
    return folder


def write_problems(file: Path, count: int = 4) -> Path:
    """Write problems of task `math`."""
    rows = [{"id": f"p{n}", "problem": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
