"""A job's configuration from conf/ and the command line. All problems come in one ConfigError."""

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Optional, Sequence, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.config import keys
from aligner.config.implied import settled
from aligner.config.jobs import JOBS
from aligner.config.validate import problems as cross_problems
from aligner.runtime.errors import ConfigError

Job = TypeVar("Job")
CONF = Path(__file__).resolve().parents[2] / "conf"

HELP = """usage: {script} [group.key=value ...] [--config-name NAME] [--config-dir DIR] [--cfg job]

  group.key=value     a setting; lists as [1,2], null for absent, quotes around text with spaces or commas
  folder=name         a file of conf/, for example tasks=chain_sum
  --config-name NAME  start from conf/NAME.yaml (default: {config_name})
  --config-dir DIR    take configurations from DIR too
  --cfg job           print the resolved configuration and end

groups: {groups}
configurations: {configs}
Every key is described in docs/configuration.md.
"""


class Setting(NamedTuple):
    """One key that was given a value, and where."""

    key: str
    value: Any
    source: str


def load(job: type[Job], argv: Optional[Sequence[str]] = None, config_name: str = "ppo_actor") -> Job:
    """The settings of a job. argv: command line without the program's name; None: this process's.

    Raises ConfigError with one line a problem. Ends the process after --help and --cfg job."""
    options, overrides = _parse(sys.argv[1:] if argv is None else argv)
    name = options.config_name or config_name
    folders = [Path(options.config_dir).absolute(), CONF] if options.config_dir else [CONF]
    if options.help:
        _end(HELP.format(script=Path(sys.argv[0]).name, config_name=config_name, groups=", ".join(keys.groups(job)),
                         configs=", ".join(_config_names(folders))))  # fmt: skip
    selections, settings = _read_overrides(overrides, folders)
    settings = _from_files(job, name, selections, folders) + settings
    config = OmegaConf.structured(job)
    problems = [problem for setting in settings for problem in _apply(config, job, setting)]
    problems += _resolve(config, job)
    missing = sorted(OmegaConf.missing_keys(config))
    if options.cfg and not problems:
        _end(OmegaConf.to_yaml(config) if missing else to_yaml(settled(OmegaConf.to_object(config))))
    problems += [f"{key} is required and was not given: {keys.docs(job)[key].splitlines()[0]}" for key in missing]
    for key in missing:
        OmegaConf.update(config, key, "missing")
    whole = settled(OmegaConf.to_object(config))
    problems += cross_problems(whole)
    if problems:
        raise ConfigError(*problems)
    return whole


def to_yaml(config: Any) -> str:
    """The settings as YAML, for config.yaml and for reports."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def to_dict(config: Any) -> dict[str, Any]:
    """The settings as nested dicts of plain values (enums by name)."""
    return OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)  # type: ignore[return-value]


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config-name")
    parser.add_argument("--config-dir")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--help", "-h", action="store_true")
    try:
        options, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"command line: {error}") from None
    flags = [word for word in rest if word.startswith("-")]
    if flags:
        raise ConfigError(
            *[f"command line: unknown option {flag}; settings are written group.key=value (--help)" for flag in flags]
        )
    return options, rest


def _end(text: str) -> None:
    """Print on one rank, and end the process."""
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        print(text, end="" if text.endswith("\n") else "\n")
    sys.exit(0)


def _config_names(folders: list[Path]) -> list[str]:
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _read_overrides(words: list[str], folders: list[Path]) -> tuple[list[Override], list[Setting]]:
    """Split the command line into choices of files (tasks=chain_sum) and settings (ppo.clip=0.1)."""
    selections, settings, problems = [], [], []
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException:
            override = None
        if override is None or not override.key_or_group:
            problems.append(
                f"command line: {word!r} is not group.key=value (quote text that has spaces, commas or brackets)"
            )
            continue
        key = override.key_or_group
        if override.is_delete():
            problems.append(
                f"command line: {word}: settings cannot be deleted; {key.lstrip('~')}=null makes one absent"
            )
        elif override.is_sweep_override():
            problems.append(
                f"command line: {word}: sweeps are not supported; write a list as [1,2], quote text with commas"
            )
        elif any((folder / key).is_dir() for folder in folders):
            selections.append(override)
        else:
            settings.append(Setting(key, override.value(), "command line"))
    if problems:
        raise ConfigError(*problems)
    return selections, settings


def _from_files(job: type, name: str, selections: list[Override], folders: list[Path]) -> list[Setting]:
    """Settings of conf/NAME.yaml, of its defaults list and of the files chosen on the command line, in order of precedence."""
    known = _config_names(folders)
    if name.removesuffix(".yaml") not in known:
        where = " or ".join(str(folder) for folder in folders)
        raise ConfigError(
            f"there is no configuration {name} in {where}{keys.did_you_mean(name, known)}; there are: {', '.join(known)}"
        )
    home = next(folder for folder in folders if name.removesuffix(".yaml") in _config_names([folder]))
    search = (
        [f"hydra.searchpath=[{','.join(str(folder) for folder in folders if folder != home)}]"]
        if len(folders) > 1
        else []
    )
    chosen = [f"{s.key_or_group}={s.value()}" for s in selections]
    logging.getLogger("hydra").setLevel(logging.ERROR)
    try:
        with initialize_config_dir(str(home), version_base="1.3"):
            composed = _compose(name, search, chosen)
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split()).partition(" Config search path")[0]
        raise ConfigError(f"configuration {name}: {text}") from error
    elsewhere = {group for other in JOBS.values() for group in keys.groups(other)} - set(keys.groups(job))
    plain = OmegaConf.to_container(composed, resolve=False)
    # a file may serve both jobs: a group that only the other job has is not for this one
    mine = {group: value for group, value in plain.items() if group not in elsewhere}
    return [Setting(key, value, f"configuration {name}") for key, value in _leaves(job, mine)]


def _compose(name: str, search: list[str], chosen: list[str]) -> DictConfig:
    """Choices of files replace those of the defaults list, and are appended where it has none (Hydra asks for a + then)."""
    for choice in chosen:
        try:
            compose(name, overrides=[*search, choice])
        except HydraException:
            chosen = [f"+{c}" if c == choice else c for c in chosen]
    return compose(name, overrides=[*search, *chosen])


def _leaves(job: type, plain: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(group.key, value) of nested dicts; a dict below a key stays whole."""
    for group, values in plain.items():
        if isinstance(values, dict) and group in keys.groups(job):
            yield from ((f"{group}.{name}", value) for name, value in values.items())
        else:
            yield group, values


def _apply(config: DictConfig, job: type, setting: Setting) -> list[str]:
    """Put one setting into the configuration. Returns the problem, if there is one."""
    key, value, source = setting
    base = ".".join(key.split(".")[:2])
    docs = keys.docs(job)
    if key in keys.groups(job):
        if not isinstance(value, dict):
            return [
                f"{source}: {key} is a group: set one of its keys, for example {next(k for k in docs if k.startswith(key + '.'))}"
            ]
        return [
            p for name, inner in value.items() for p in _apply(config, job, Setting(f"{key}.{name}", inner, source))
        ]
    if base not in docs or (key != base and not keys.is_free_form(job, base)):
        return [f"{source}: {keys.unknown_key(job, key)}"]
    try:
        OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException:
        return [f"{source}: {key}={value!r} is not {keys.expected(job, base, value)}"]
    return []


def _resolve(config: DictConfig, job: type) -> list[str]:
    """Resolve ${...}. What does not resolve to a value of its key is a problem, and takes its default for the checks that follow."""
    problems = []
    for group in config:
        for name in config[group]:
            try:
                if OmegaConf.is_interpolation(config[group], name):
                    config[group][name] = config[group][name]
            except OmegaConfBaseException as error:
                problems.append(f"{group}.{name}: {str(error).splitlines()[0]}")
                OmegaConf.update(config, f"{group}.{name}", OmegaConf.structured(job)[group]._get_node(name)._value())
    return problems
