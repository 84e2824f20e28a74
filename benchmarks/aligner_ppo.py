"""One process of this toolkit's PPO trainer, with the critic and the reward model in it. Started by ppo_step.py.

Prints a line `STEP {...}` a step with TRL's phases (see trl_ppo.py) and, in detail, this toolkit's own. `score` holds what follows the
responses: log-probs of policy and reference, values, rewards, advantages."""

import argparse
import json
import tempfile
import time
from pathlib import Path

from trl_ppo_settings import CLIP, KL, LEARNING_RATE

from aligner.algorithms.actor_job import build_actor
from aligner.config.jobs import ActorConfig
from aligner.config.load import load


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("policy", "reward", "prompts"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("rows", "prompt", "response", "mini-batch", "score-batch", "steps", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    return parser.parse_args()
