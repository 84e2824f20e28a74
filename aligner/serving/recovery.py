"""What brings a critic job back to the step that the actor is at: a decision from what both say, without a connection."""

from dataclasses import dataclass
from typing import Collection

from aligner.runtime.errors import ContractError


@dataclass(frozen=True)
class Plan:
    """restore: load the pair first (step 0: the initial weights). replay: steps whose journalled requests follow, in order."""

    restore: bool
    replay: tuple[int, ...] = ()


IN_STEP = Plan(restore=False)


def plan(
    *,
    actor_step: int,
    critic_step: int,
    trusted: bool,
    pair_step: int,
    journalled: Collection[int],
    asked: Collection[int],
) -> Plan:
    """actor_step: the last step that the critic acknowledged. critic_step: what it says now. trusted: it is the same process as
    before, and its weights are those of a step. pair_step: the newest committed pair, 0 for none. asked: steps under way, which a
    critic whose answer was lost may have applied.

    Raises ContractError where the journal lacks what the pair does not hold."""
    if trusted and (critic_step == actor_step or (critic_step == actor_step + 1 and critic_step in asked)):
        return IN_STEP
    needed = tuple(range(pair_step + 1, actor_step + 1))
    if missing := sorted(set(needed) - set(journalled)):
        raise ContractError(
            f"the critic job is at step {critic_step}, the actor at step {actor_step}, and between the pair of step {pair_step} and "
            f"there the journal lacks {', '.join(map(str, missing))}: start the actor job again, which takes both back to the pair"
        )
    return Plan(restore=True, replay=needed)
