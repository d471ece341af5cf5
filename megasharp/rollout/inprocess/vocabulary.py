"""Whether a policy and a memory network speak of the same tokens: their logits are subtracted token by token."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from megasharp.convert.architecture import Architecture
from megasharp.errors import UserError, one_line

TOKENIZER_FILE = "tokenizer.json"


def check_same_vocabulary(policy_folder: Path, policy: Architecture, memory_folder: Path, memory: Architecture) -> None:
    """Refuse a memory network whose vocabulary is not the policy's.

    Tokenizers are compared where both folders have a tokenizer.json, by the ids of their tokens.

    Raises:
        UserError: the vocabulary sizes or the tokens' ids differ, or a tokenizer.json cannot be read.
    """
    if policy.vocab != memory.vocab:
        raise UserError(
            f"the policy {policy_folder} has vocab_size {policy.vocab}, the memory network {memory_folder} "
            f"{memory.vocab}; choose a memory of the policy's model family, with the same vocabulary"
        )
    files = (policy_folder / TOKENIZER_FILE, memory_folder / TOKENIZER_FILE)
    if not all(file.is_file() for file in files) or files[0].read_bytes() == files[1].read_bytes():
        return
    ours, theirs = (_token_ids(file) for file in files)
    differing = sorted(token for token, _ in ours.items() ^ theirs.items())
    if differing:
        token = differing[0]
        raise UserError(
            f"token {token!r} has id {ours.get(token)} in {files[0]} but {theirs.get(token)} in {files[1]}; "
            "the memory network must share the policy's tokenizer"
        )


def _token_ids(file: Path) -> dict[str, int]:
    try:
        return dict(PreTrainedTokenizerFast(tokenizer_file=str(file)).get_vocab())
    except Exception as error:  # the tokenizers library raises plain Exception for a bad file
        raise UserError(f"{file}: cannot be read ({one_line(error)}); copy it from the model again") from error
