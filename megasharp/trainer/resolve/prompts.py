"""The prompts of a run: how its suites are asked, one that is shown, and the refusal of another model's markers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megasharp.common.errors import UserError
from megasharp.common.terminal import visible
from megasharp.config.core import Tree
from megasharp.config.data import DataSource
from megasharp.config.run_config import RunConfig
from megasharp.evals.suites import OWN, Asking, Suite
from megasharp.tasks.own_reward import is_own
from megasharp.tasks.problems import is_worded, prompt_of, published_prompt, task_of
from megasharp.tasks.prompts import by_chat, markers_in, template_named
from megasharp.tasks.stream import TokenizedPrompts
from megasharp.tasks.tokenizer import TextTokenizer

# Of a prompt that is shown: characters of its beginning and of its end.
_HEAD, _TAIL = 280, 120
# In the place of a template's name.
_WORDS = "words of your own"


def checked_name(prompt: str) -> str:
    """Return the name of a template, or `suite`. Raises UserError for another one."""
    if prompt != OWN:
        template_named(prompt)
    return prompt


def trained_by(config: RunConfig, prompts: TokenizedPrompts) -> tuple[str, str]:
    """Return training's task and its prompts' template, which is empty for the words or messages of own rows."""
    worded = is_worded(config.data, (item for item, _ in prompts.prompts))
    return task_of(config.data), prompt_of(config.data) if worded else ""


def asking_of(config: RunConfig) -> Asking:
    """Return how a run asks suites whose files name no template. Raises UserError for an unknown one."""
    name = config.eval.prompt and checked_name(config.eval.prompt)
    data = config.data
    return Asking(name, (task_of(data), prompt_of(data)), (data.system, data.template))


def prompts_meant(stored: Tree) -> Tree:
    """Return a stored configuration with the prompts that one without `eval.prompt` (before 2026-11-25) means.

    Sets and tasks were asked by their published templates, suites by their own, and no token began a plain prompt.
    """
    data: Any = stored.get("data")
    evaluation: Any = stored.get("eval") or {}
    if "prompt" in evaluation or not isinstance(data, dict):
        return stored
    own = published_prompt(data.get("set"), data.get("task"))
    prompt = data.get("prompt") or (own if by_chat(own) != own else None)
    return {**stored, "data": {**data, "prompt": prompt, "bos": False}, "eval": {**evaluation, "prompt": OWN}}


def check_words(data: DataSource, tokenizer: TextTokenizer, where: str) -> None:
    """Raise UserError for special tokens in the words around own prompts, which are text of messages."""
    for key, text in (("data.system", data.system), ("data.template", data.template)):
        found = markers_in(text or "")
        if found and (tokenizer.backend.chat_template or tokenizer.missing(found)):
            raise UserError(
                f"{where}: {key} has {found[0]} in it: it is the text of a message, and the model's own chat template "
                "writes special tokens; leave them out"
            )


def check_markers(
    training: str, suites: Sequence[Suite], tokenizer: TextTokenizer, where: str, key: str = "eval.prompt"
) -> None:
    """Raise UserError for a template whose own words name special tokens that this tokenizer does not have.

    `training` is the template of training, empty for none, and `key` sets that of the suites. Such names in a problem's
    text are the problem's.
    """
    asked = [("it", training, "data.prompt"), *((f"suite {each.name}", each.prompt, key) for each in suites)]
    for who, name, its_key in asked:
        template = template_named(name) if name else None
        missing = tokenizer.missing(template.markers) if template else []
        if template and missing:
            raise UserError(
                f"{where}: {who} asks by {name}, whose {missing[0]} is no token of {tokenizer.backend.name_or_path}; "
                f"set {its_key}={template.in_chat or 'chat'}, which the model's own chat template writes"
            )


def shown_prompt(config: RunConfig, prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> str:
    """Return the first prompt in one line, special tokens and control characters written out, and its making."""
    (item, tokens), (task, name) = prompts.prompts[0], trained_by(config, prompts)
    by = name or (_WORDS if item.turns else f"{task}'s own")
    if item.turns:
        written = tokenizer.chat(item.turns) is not None
        by += " in the model's chat template" if written else " as plain text, for the model has no chat template"
    else:
        by += ", plain text"
    text = visible(tokenizer.written_out(tokens)).replace("\n", "⏎").replace("\t", "⇥")
    if len(text) > _HEAD + _TAIL:
        text = f"{text[:_HEAD]} [...] {text[-_TAIL:]}"
    return f"{text} ({len(tokens)} tokens; {by})"


def turn_end_note(prompts: TokenizedPrompts, tokenizer: TextTokenizer) -> list[str]:
    """Return the line that says that responses do not stop where the chat template ends an answer, if they do not."""
    end = tokenizer.turn_end() if any(item.turns for item, _ in prompts.prompts) else None
    if end is None or end in tokenizer.stop_token_ids:
        return []
    name, stops = tokenizer.written_out([end]), tokenizer.written_out(tokenizer.stop_token_ids)
    return [
        f"the model's chat template ends an answer with {name} (token {end}), at which responses do not stop (they do "
        f"at {stops}); where the model writes it, add {end} to eos_token_id in generation_config.json"
    ]


def prompt_differences(training: tuple[str, str], suites: Sequence[Suite]) -> list[str]:
    """Return the line that says which suites of training's task are asked otherwise than training, if any are.

    Where a function of the user's judges, any suite is compared.
    """
    task, template = training
    other = [
        f"{each.name} asks by {each.prompt or _WORDS}"
        for each in suites
        if each.prompt != template and (each.task == task or is_own(task))
    ]
    if not other:
        return []
    by = template or _WORDS
    return [f"eval prompts differ from training's: suite {', '.join(other)}, training by {by}; set eval.prompt"]
