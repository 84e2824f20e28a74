"""Which settings does the code read? Tests set ALIGNER_CONFIG_READS to a file; every process then appends the keys it reads to it.

Without the variable nothing here runs. Reads by tests, by this package's own checks and printing, and by the dataclass
machinery do not count."""

import os
import sys
from pathlib import Path
from typing import Any

VARIABLE = "ALIGNER_CONFIG_READS"
ENTRY_SCRIPTS = {"__main__", "__mp_main__", "train_ppo_actor", "serve_ppo_critic", "serve_reward_model"}
ENTRY_SCRIPTS |= {"train_sft", "train_reward_model"}
DERIVED = {"aligner.config.jobs", "aligner.config.reward"}  # values that follow from settings, for whoever asks


def _counts(module: str) -> bool:
    return module in ENTRY_SCRIPTS | DERIVED or (
        module.startswith("aligner.") and not module.startswith("aligner.config")
    )


def record_reads(groups: dict[type, set[str]], file: Path) -> None:
    """From now on append CLASS.FIELD, once a process, for each field of the given dataclasses that the code reads."""
    seen: set[str] = set()

    def reading(cls: type, names: set[str]) -> Any:
        def getattribute(self: Any, name: str) -> Any:
            if (
                name in names
                and f"{cls.__name__}.{name}" not in seen
                and _counts(sys._getframe(1).f_globals["__name__"])
            ):
                seen.add(f"{cls.__name__}.{name}")
                with file.open("a") as out:  # one short line in append mode: processes do not mix
                    out.write(f"{cls.__name__}.{name}\n")
            return object.__getattribute__(self, name)

        return getattribute

    for cls, names in groups.items():
        cls.__getattribute__ = reading(cls, names)  # type: ignore[method-assign]


def record_if_asked() -> None:
    """Record where the environment asks for it."""
    if VARIABLE in os.environ:
        record_reads(all_fields(), Path(os.environ[VARIABLE]))


def all_fields() -> dict[type, set[str]]:
    """Every dataclass of settings and its fields."""
    from aligner.config import keys
    from aligner.config.jobs import JOBS
    from aligner.config.reward import RewardPart

    classes = {cls for job in JOBS.values() for cls in keys.groups(job).values()}
    return {cls: set(keys.field_docs(cls)) for cls in (*classes, RewardPart)}
