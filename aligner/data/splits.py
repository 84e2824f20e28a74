"""From the data settings to the samples of training and validation: template, chat, and the length limit on the final ids."""

import logging
import string
from dataclasses import dataclass, replace
from typing import Any, Optional

from aligner.config.groups import DataConfig, Overlong
from aligner.data.batch import Sample
from aligner.data.jsonl import SHOWN
from aligner.data.prompts import PromptRecord, read_prompts
from aligner.data.tasks import Problem, draw_problems, split_problems
from aligner.data.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limited:
    """Samples within the length limit, and how many were dropped or cut to get there."""

    samples: list[Sample]
    dropped: int = 0
    truncated: int = 0


def fill_template(template: str, placeholders: dict[str, str]) -> str:
    """The template with its {placeholders} filled in; braces in the values stay as they are.

    Raises ValueError, with the placeholders there are, for an unknown one, for a format or conversion, or for a template with none."""
    available = ", ".join("{" + name + "}" for name in placeholders)
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ValueError(
            f"data.template={template!r} is malformed ({error}); a literal brace is written twice"
        ) from error
    named = [part for part in parts if part[1] is not None]
    if not named:
        raise ValueError(
            f"data.template={template!r} names no placeholder, so that all prompts would be equal; it may use {available}"
        )
    for _, name, spec, conversion in named:
        if name not in placeholders or spec or conversion:
            how = " with a format" if spec or conversion else ""
            raise ValueError(f"data.template={template!r} uses {{{name}}}{how}; it may use {available}")
    return "".join(text + (placeholders[name] if name is not None else "") for text, name, _, _ in parts)


def build_sample(
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    origin: str,
    placeholders: Optional[dict[str, str]],
    messages: Optional[list[dict[str, str]]],
    fields: dict[str, Any],
) -> Sample:
    """One sample: placeholders fill data.template, or a conversation is taken as it is. `prompt` is the text before the chat template."""
    if messages is None:
        text = fill_template(data.template, placeholders)
        messages = [{"role": "user", "content": text}]
    elif not data.chat:
        raise ValueError(f"{origin} has `messages`, which need data.chat=true")
    else:
        text = messages[-1]["content"]
    ids = tokenizer.chat(messages, data.system) if data.chat else tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{origin} has no tokens: {text!r}")
    return Sample(prompt_ids=ids, prompt=text, origin=origin, fields=fields)


def from_problem(problem: Problem, tokenizer: Tokenizer, data: DataConfig) -> Sample:
    return build_sample(
        tokenizer,
        data,
        origin=problem.origin,
        placeholders=problem.placeholders(),
        messages=None,
        fields=problem.fields,
    )


def from_record(record: PromptRecord, tokenizer: Tokenizer, data: DataConfig) -> Sample:
    named = {"prompt": record.prompt, "question": record.prompt} if record.prompt is not None else None
    return build_sample(
        tokenizer, data, origin=record.origin, placeholders=named, messages=record.messages, fields=record.fields
    )


def limit_length(samples: list[Sample], *, overlong: Overlong, max_input_len: int, tokenizer: Tokenizer) -> Limited:
    """Samples whose final ids fit max_input_len: drop, truncate (the last tokens stay), or refuse with their origins."""
    long = [s for s in samples if len(s.prompt_ids) > max_input_len]
    if not long:
        return Limited(samples)
    if overlong is Overlong.refuse:
        shown = ", ".join(f"{s.origin} ({len(s.prompt_ids)})" for s in long[:SHOWN])
        more = f" and {len(long) - SHOWN} more" if len(long) > SHOWN else ""
        raise ValueError(
            f"{len(long)} of {len(samples)} prompts are longer than engine.max_input_len={max_input_len} tokens: {shown}{more}; "
            "raise it, or set data.overlong to drop or truncate"
        )
    if overlong is Overlong.drop:
        log.warning(
            "dropped %d of %d prompts longer than engine.max_input_len=%d", len(long), len(samples), max_input_len
        )
        return Limited([s for s in samples if len(s.prompt_ids) <= max_input_len], dropped=len(long))
    log.warning(
        "cut %d of %d prompts to their last %d tokens (engine.max_input_len)", len(long), len(samples), max_input_len
    )
    return Limited([_cut(s, max_input_len, tokenizer) for s in samples], truncated=len(long))


def _cut(sample: Sample, length: int, tokenizer: Tokenizer) -> Sample:
    if len(sample.prompt_ids) <= length:
        return sample
    kept = sample.prompt_ids[-length:]
    return replace(sample, prompt_ids=kept, prompt=tokenizer.decode(kept, skip_special=False))


def load_splits(data: DataConfig, *, seed: int, tokenizer: Tokenizer, max_input_len: int) -> tuple[Limited, Limited]:
    """(train, held-out) samples of a task or of prompt files; held-out is empty where nothing is held out.

    Raises ValueError where no prompt is left to train on."""
    if (data.task is None) == (data.prompts is None):
        raise ValueError(f"set exactly one of data.task and data.prompts; they are {data.task} and {data.prompts}")
    if data.task is not None:
        problems = draw_problems(data.task, dict(data.task_config), size=data.task_size, seed=seed, key=data.task_key)
        sides = [[from_problem(p, tokenizer, data) for p in side] for side in split_problems(problems, data.holdout)]
    else:
        files = (data.prompts, data.validation_prompts)
        sides = [[from_record(r, tokenizer, data) for r in read_prompts(path)] if path else [] for path in files]
    train, held = (
        limit_length(side, overlong=data.overlong, max_input_len=max_input_len, tokenizer=tokenizer) for side in sides
    )
    if not train.samples:
        raise ValueError(
            f"all {train.dropped} prompts are longer than engine.max_input_len={max_input_len} tokens: raise it"
        )
    return train, held
