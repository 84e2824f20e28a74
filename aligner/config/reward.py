"""What scores a response. A field's default lives here and nowhere else; the string below a field is its documentation."""

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional


class RewardKind(Enum):
    task = "task"
    maths = "maths"
    exact = "exact"
    regex = "regex"
    format = "format"
    function = "function"
    parts = "parts"
    model = "model"
    http = "http"


class RewardPlace(Enum):
    auto = "auto"
    critic = "critic"
    actor = "actor"
    server = "server"


class FinalAnswer(Enum):
    any = "any"
    boxed = "boxed"
    hashes = "hashes"
    last_number = "last_number"
    whole = "whole"


@dataclass
class VerifierConfig:
    """What one verifier needs: the keys of reward itself, and of each entry of reward.parts."""

    kind: RewardKind = RewardKind.task
    """task: the reasoning-gym task's verifier; maths: the final answer equals the right one; exact: the text does; regex: it matches
    pattern; format: it has the form of template or pattern; function: yours; parts: several of these, weighted (reward.parts); model: a
    reward model on Megatron; http: a service of yours at reward.url (docs/rewards.md)."""
    function: Optional[str] = None
    """`file.py:name` of a Python function (response: str, sample: dict) -> float or dict of parts, run in sandboxed workers."""
    answer: str = "first_integer"
    """How a task's answer is checked: first_integer (the first signed integer is right, 0 or 1) or task (reasoning-gym's own scorer)."""
    format_credit: float = 0.0
    """For kind task, added for form: half for exactly one number in the response, half for ending by itself."""
    answer_field: str = "answer"
    """For maths and exact: the key of a line of data.prompts that holds the right answer. A task has its own answer there."""
    extract: Optional[str] = None
    """For maths and exact: a regular expression whose last match is checked instead of the whole response: its first group, where it
    has one, as in `<answer>(.*?)</answer>`. A response without a match is wrong."""
    final_answer: FinalAnswer = FinalAnswer.any
    """For maths, what of the response is its answer: boxed (the last \\boxed{}), hashes (what follows the last ####), last_number, whole
    (all of it), or any (the first of boxed, hashes and last_number that there is)."""
    ignore_case: bool = False
    """For exact: upper and lower case are alike."""
    pattern: Optional[str] = None
    """A regular expression (Python's; a dot also matches a line break): for regex it matches somewhere, for format the whole response."""
    template: Optional[str] = None
    """For format: the response's form, as in `<think>{}</think><answer>{}</answer>`: each tag (or text between tags and places) occurs
    once, in this order, {} stands for some text, and space beside tags does not count."""


@dataclass
class RewardPart(VerifierConfig):
    weight: float = 1.0
    """Factor of this part's reward in the sum."""
    name: Optional[str] = None
    """The part is logged as reward/NAME; absent: its kind."""


HOLE = "{}"


def template_tokens(template: str) -> list[str]:
    """Tags, texts between them, and {}."""
    tokens = re.split(r"(\{\}|<[^<>{}]*>)", template)
    return [token.strip() for token in tokens if token.strip()]


def part_name(part: RewardPart) -> str:
    """What a part is logged as, below reward/."""
    return part.name or part.kind.name


def model_part(reward: "RewardConfig") -> Optional[RewardPart]:
    """The part that is a reward model, where there is one."""
    return next((part for part in reward.parts if part.kind is RewardKind.model), None)


def has_model(reward: "RewardConfig") -> bool:
    """Whether a reward model scores, alone or as one of the parts."""
    return reward.kind is RewardKind.model or model_part(reward) is not None


def reward_name(reward: "RewardConfig") -> str:
    """What two jobs must agree on: the kind, or `parts(exact: 1 exact, taste: 0.5 model)`."""
    if reward.kind is not RewardKind.parts:
        return reward.kind.value
    return f"parts({', '.join(f'{part_name(p)}: {p.weight:g} {p.kind.value}' for p in reward.parts)})"


@dataclass
class RewardConfig(VerifierConfig):
    place: RewardPlace = RewardPlace.auto
    """Which job scores: critic, actor, or server (a reward job of its own, serve_reward_model.py). auto: the critic's job where there
    is a critic, else the actor's."""
    parts: list[RewardPart] = field(default_factory=list)
    """For kind parts: `[{kind: maths, weight: 1.0}, {kind: format, weight: 0.1, template: ...}]`. A part has the keys that go with its
    kind, weight, and name (logged as reward/NAME; absent: its kind). The reward is the weighted sum. One of them may be the reward
    model of reward.checkpoint."""
    endpoint: Optional[str] = None
    """For place server: host:port of the reward job; absent: read from the run's endpoints/reward.json."""
    checkpoint: Optional[str] = None
    """Folder of a reward model, converted or trained here, for kind model (reward's own, or a part's)."""
    standardise: bool = False
    """For kind model (reward's own, or a part's): scores less their mean over their deviation, as train_reward_model.py measured them on
    held-out responses."""
    micro_batch_size: int = 4
    """Rows a forward pass of the reward model on one data-parallel rank."""
    micro_batch_tokens: Optional[int] = None
    """Tokens a forward pass of the reward model, padding included, instead of reward.micro_batch_size rows. Absent: rows count."""
    workers: int = 1
    """Verifier processes."""
    timeout: float = 10.0
    """Deadline of one score, in seconds; for kind http of one attempt to get a request answered."""
    failed_score: Optional[float] = None
    """What a response earns whose verifier raised, hung or died while it scored it, counted in reward/failed and told in the log. A
    reward model among the parts adds its own share.
    Absent: such a response ends the step with an error that names it."""
    url: Optional[str] = None
    """For kind http: where samples are posted, http://HOST:PORT/PATH or https."""
    deadline: float = 120.0
    """For kind http: seconds after which a request that no attempt got answered has failed."""
    concurrency: int = 8
    """For kind http: requests at once, of each rank that scores."""
    batch_size: int = 16
    """For kind http: responses a request at most."""
    memory_mb: int = 2048
    """Address space of a verifier process, in MB."""
    allow_eval: bool = False
    """Allow reasoning-gym tasks whose scorers evaluate text."""
