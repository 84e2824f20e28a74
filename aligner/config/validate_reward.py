"""Checks of verifiers: which keys go with which kind, patterns and templates, parts and their names."""

import re
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Iterator

from aligner.config.reward import (
    HOLE,
    FinalAnswer,
    RewardConfig,
    RewardKind,
    RewardPart,
    VerifierConfig,
    part_name,
    template_tokens,
)

# key -> the kinds that read it
GOES_WITH = {
    "function": {RewardKind.function},
    "format_credit": {RewardKind.task},
    "answer_field": {RewardKind.maths, RewardKind.exact},
    "extract": {RewardKind.maths, RewardKind.exact},
    "final_answer": {RewardKind.maths},
    "ignore_case": {RewardKind.exact},
    "pattern": {RewardKind.regex, RewardKind.format},
    "template": {RewardKind.format},
}
NOT_PARTS = {RewardKind.parts, RewardKind.http}
# names below reward/ that the actor writes itself
TAKEN = {"mean", "std", "scaled_mean", "scaled_max", "running_mean", "running_std", "accuracy", "failed", "reward"}


def verifier_problems(where: str, part: VerifierConfig) -> Iterator[str]:
    """`where`: the keys' prefix, reward or reward.parts[0]."""
    for name, kinds in GOES_WITH.items():
        value = getattr(part, name)
        if part.kind not in kinds and value != _default(name):
            shown = value.name if isinstance(value, FinalAnswer) else value
            needed = " or ".join(sorted(kind.name for kind in kinds))
            yield f"{where}.{name}={shown} needs {where}.kind={needed}, and it is {part.kind.name}"
    if part.answer not in ("first_integer", "task"):
        yield f"{where}.answer={part.answer} must be first_integer or task"
    if part.kind is RewardKind.function:
        yield from _function(where, part)
    if part.kind in GOES_WITH["pattern"]:
        yield from _form(where, part)
    for name in ("pattern", "extract"):
        if (pattern := getattr(part, name)) is not None:
            yield from _expression(f"{where}.{name}", pattern)


def parts_problems(reward: RewardConfig) -> Iterator[str]:
    if reward.kind is not RewardKind.parts:
        if reward.parts:
            yield f"reward.parts needs reward.kind=parts, and it is {reward.kind.name}"
        return
    if not reward.parts:
        yield "reward.kind=parts needs reward.parts, for example [{kind: maths, weight: 1.0}, {kind: format, weight: 0.1, template: ...}]"
    for at, part in enumerate(reward.parts):
        where = f"reward.parts[{at}]"
        yield from _part(where, part)
        yield from verifier_problems(where, part)
    if (models := [part.kind for part in reward.parts].count(RewardKind.model)) == len(reward.parts) == 1:
        yield "reward.parts is a reward model alone: set reward.kind=model instead"
    elif models > 1:
        yield f"reward.parts has {models} reward models, and reward.checkpoint is one: leave one of them"
    for name, count in Counter(part_name(part) for part in reward.parts).items():
        if count > 1:
            yield f"reward.parts has {count} parts that are logged as reward/{name}: give each a name of its own"


def _part(where: str, part: RewardPart) -> Iterator[str]:
    if part.kind in NOT_PARTS:
        yield f"{where}.kind={part.kind.name} cannot be a part: parts are verifiers, and one may be a reward model"
    if not part_name(part).isidentifier() or part_name(part) in TAKEN:
        yield f"{where}.name={part.name}: reward/{part.name} must be a name of letters, digits and _ that is not taken"
    if part.weight == 0 or part.weight != part.weight or abs(part.weight) == float("inf"):
        yield f"{where}.weight={part.weight} must be a finite number other than 0"
    if part.format_credit < 0:
        yield f"{where}.format_credit={part.format_credit} must not be negative"


def _default(name: str) -> Any:
    field = next(f for f in fields(VerifierConfig) if f.name == name)
    assert field.default is not MISSING
    return field.default


def _function(where: str, part: VerifierConfig) -> Iterator[str]:
    path, _, name = (part.function or "").rpartition(":")
    if not path or not name.isidentifier():
        yield f"{where}.kind=function needs {where}.function=file.py:name, and it is {part.function}"
    elif not Path(path).is_file():
        yield f"{where}.function={part.function}: there is no file {Path(path).absolute()}"


def _form(where: str, part: VerifierConfig) -> Iterator[str]:
    if part.kind is RewardKind.regex:
        if part.pattern is None:
            yield f"{where}.kind=regex needs {where}.pattern, a regular expression"
        return
    if (part.pattern is None) == (part.template is None):
        yield (
            f"{where}.kind=format needs exactly one of {where}.template and {where}.pattern "
            f"(template={part.template}, pattern={part.pattern})"
        )
    if part.template is not None:
        yield from _template(f"{where}.template={part.template!r}", part.template)


def _template(what: str, template: str) -> Iterator[str]:
    tokens = template_tokens(template)
    texts = [token for token in tokens if token != HOLE]
    if HOLE not in tokens:
        yield f"{what} has no {{}}, which stands for some text, as in <answer>{{}}</answer>"
    if not texts or any(pair == (HOLE, HOLE) for pair in zip(tokens, tokens[1:], strict=False)):
        yield f"{what} needs text between one {{}} and the next"
    if repeated := [text for text, count in Counter(texts).items() if count > 1]:
        yield f"{what} has {repeated[0]!r} twice, and each text may occur once: use pattern"


def _expression(what: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield f"{what}={pattern!r} is no regular expression: {error}"
