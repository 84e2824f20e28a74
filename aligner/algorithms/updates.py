"""The mini-batches of one step, trained on in turn: what the policy and the critic share."""

import logging
from typing import Any, Callable, Iterable, Mapping

log = logging.getLogger(__name__)


def train_in_turn(
    mini_batches: Iterable[Any],
    train: Callable[[Any], dict[str, float]],
    *,
    step: int,
    keep_batch: Callable[[str, Mapping[str, Any]], str],
) -> dict[str, float]:
    """Means of the metrics over the updates applied, and how many were `skipped`.

    One that is skipped is named and its batch kept (keep_batch says where); one without a token in its mask counts as neither."""
    applied, skipped = [], 0
    for number, batch in enumerate(mini_batches):
        update = train(batch)
        if update["empty"]:
            continue
        if update["skipped"]:
            skipped += 1
            where = keep_batch(f"step_{step}_update_{number}", vars(batch))
            log.warning("step %d: update %d was skipped, its loss or gradient is not finite%s", step, number, where)
        else:
            applied.append(update)
    means = {key: sum(u[key] for u in applied) / len(applied) for key in (applied[0] if applied else {})}
    return {**means, "skipped": float(skipped)}
