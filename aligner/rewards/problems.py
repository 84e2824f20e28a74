"""The problem that a sample is about: its fields, and of a task the problem itself, regenerated. Standard library only at import."""

import json
from typing import Any

from aligner.data.tasks import create_dataset, digest


class Problems:
    """reasoning-gym problems regenerated from (task, config, seed, index); datasets are kept."""

    def __init__(self) -> None:
        self._datasets: dict[str, Any] = {}

    def __call__(self, sample: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """(dataset, entry) of a sample. Raises ValueError where this host generates another problem than the sender's."""
        task, config, seed, index = (sample[name] for name in ("task", "config", "seed", "index"))
        known_by = json.dumps([task, config, seed], sort_keys=True)
        if known_by not in self._datasets:
            self._datasets[known_by] = create_dataset(task, config, seed)
        dataset = self._datasets[known_by]
        entry = dataset[index]
        if "digest" in sample and digest(entry) != sample["digest"]:
            raise ValueError(
                f"problem {index} of {task} is another one here ({entry['question']!r}): install the same reasoning-gym on both hosts"
            )
        return dataset, entry

    def fields(self, sample: dict[str, Any]) -> dict[str, Any]:
        """The sample's fields; of a task with its `question` and `answer`."""
        if "task" not in sample:
            return sample
        _, entry = self(sample)
        return {**sample, "question": entry["question"], "answer": entry["answer"]}


def right_answer(fields: dict[str, Any], name: str) -> str:
    """The text of the field that holds the right answer. Raises ValueError where it is missing, empty, or no text or number."""
    if name not in fields:
        known = ", ".join(sorted(set(fields) - {"ended", "prompt"})) or "no fields"
        raise ValueError(
            f"the sample has no field {name} for its right answer, it has {known}: set reward.answer_field"
        )
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"the right answer, field {name}, is {value!r}: it must be text or a number")
    text = value if isinstance(value, str) else repr(value)
    if not text.strip():
        raise ValueError(f"the right answer, field {name}, is empty")
    return text.strip()
