"""Settings of supervised jobs (train_sft.py, train_reward_model.py): what both share, and what is supervised fine-tuning's alone.

Where a class has a base, its documentation and defaults are the base's, and only what differs stands in it."""

from dataclasses import dataclass
from enum import Enum
from typing import Optional

from aligner.config.groups import Overlong, RunConfig


class LossOn(Enum):
    all_turns = "all_turns"
    last_turn = "last_turn"


@dataclass
class SupervisedRunConfig(RunConfig):
    max_steps: Optional[int] = None
    """Number of optimizer steps at most; absent: train.epochs decide alone."""


@dataclass
class TrainConfig:
    epochs: Optional[int] = 1
    """Passes over the training rows; absent: as many as run.max_steps needs."""
    mini_batch_size: int = 128
    """Rows an optimizer step, over all data-parallel ranks (of a reward model: lines of the file, each with all its responses). The last
    step of a run has the rows that are left."""
    micro_batch_size: int = 4
    """Rows a forward pass on one data-parallel rank (of a reward model: responses; those of a line are not parted)."""
    micro_batch_tokens: Optional[int] = None
    """Tokens a forward pass on one data-parallel rank, padding included, instead of train.micro_batch_size rows. Absent: rows count."""


@dataclass
class SupervisedDataConfig:
    train: str = "???"
    """JSONL file to train on, one row a line (docs/sft.md and docs/reward-models.md say what it holds)."""
    validation: Optional[str] = None
    """JSONL file of held-out rows; absent: data.holdout takes them from data.train."""
    holdout: float = 0.0
    """Share of data.train, chosen by the hash of each prompt, that is held out where data.validation is absent."""
    chat: bool = True
    """Apply the tokenizer's chat template to `prompt` rows too; false: their texts as they are, with an end token."""
    system: Optional[str] = None
    """System message put before conversations that have none; absent: the chat template's own default."""
    max_length: int = 2048
    """Longest row in tokens."""
    overlong: Overlong = Overlong.drop
    """What happens to a row longer than data.max_length tokens: drop it, truncate it (its first tokens stay), or refuse the file. Drops
    and cuts are counted."""
    shuffle: bool = True
    """Shuffle rows anew each epoch, from run.seed alone."""


@dataclass
class SFTDataConfig(SupervisedDataConfig):
    loss_on: LossOn = LossOn.all_turns
    """Whose tokens are learned: every turn of the assistant, or the last one alone. The end of a turn is learned with it."""


@dataclass
class SupervisedValidationConfig:
    every: int = 100
    """Steps between validations; 0 never. The first is before training, the last after the last step."""
    max_rows: int = 1024
    """Held-out rows, the same at each validation."""


@dataclass
class SFTValidationConfig(SupervisedValidationConfig):
    generations: int = 0
    """Responses to the prompts of the first held-out rows, written to validation/step_N.jsonl at each validation; 0: none, and no
    engine."""
    temperature: float = 0.0
    """Sampling temperature of these responses; 0 is greedy."""
    top_k: int = 0
    """Sample from this many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens whose probabilities reach this share; 1: all."""
    min_p: float = 0.0
    """Sample from tokens of at least this share of the likeliest one's probability; 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or response hold; 1: none."""
    min_output_len: int = 0
    """Stop tokens are impossible before this many tokens."""


@dataclass
class SFTSettings:
    packing: bool = False
    """Put several rows of a mini-batch behind each other, up to data.max_length tokens (or train.micro_batch_tokens) a forward pass, each
    with positions and attention of its own. Losses and gradients are those of rows apart; less is padded."""
