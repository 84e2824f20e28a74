"""What the keys of a job are: their types, their documentation (the string below a field), and the nearest one to a mistyped one."""

import ast
import difflib
import functools
import inspect
import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Optional, Union, get_args, get_origin, get_type_hints

from aligner.config.jobs import JOBS


@functools.cache
def groups(job: type) -> dict[str, type]:
    """Group name -> its dataclass, in order."""
    return get_type_hints(job)


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """Field of a dataclass (or member of an enum) -> the string that stands below it in the source; "" where there is none."""
    found = dict.fromkeys(cls.__members__ if issubclass(cls, Enum) else (f.name for f in fields(cls)), "")
    body = [s for base in _written_here(cls) for s in ast.parse(inspect.getsource(base)).body[0].body]  # type: ignore[attr-defined]
    for statement, below in zip(body, body[1:], strict=False):
        documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if documented and isinstance(statement, (ast.AnnAssign, ast.Assign)):
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            found[target.id] = inspect.cleandoc(below.value.value)  # type: ignore[union-attr]
    return found


def _written_here(cls: type) -> list[type]:
    """The class and those of its bases that have fields, bases first: what a class says of a field counts more."""
    return [base for base in reversed(cls.__mro__) if base is cls or is_dataclass(base)]


@functools.cache
def docs(job: type) -> dict[str, str]:
    """group.key -> documentation, of every key of a job."""
    return {f"{group}.{name}": text for group, cls in groups(job).items() for name, text in field_docs(cls).items()}


def type_of(job: type, key: str) -> Any:
    """The annotation of group.key."""
    group, name = key.split(".")
    return get_type_hints(groups(job)[group])[name]


def optional_inside(hint: Any) -> Optional[Any]:
    """T of Optional[T]; None where the annotation is no Optional."""
    if get_origin(hint) not in (Union, types.UnionType):
        return None
    return next(arg for arg in get_args(hint) if arg is not type(None))


def is_free_form(job: type, key: str) -> bool:
    """Whether keys below group.key are the user's own (a dict)."""
    return get_origin(type_of(job, key)) is dict


def type_name(hint: Any) -> str:
    """The annotation for a reader: int, number, true or false, one of a, b."""
    inside = optional_inside(hint)
    if inside is not None:
        return f"{type_name(inside)} or null"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if get_origin(hint) is list:
        return f"a list of {type_name(get_args(hint)[0])}"
    if is_dataclass(hint):
        return "mappings"
    if get_origin(hint) is dict:
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[hint]


def expected(job: type, key: str, value: Any) -> str:
    """What group.key takes, with the nearest member of an enum, or with the entry of a list of mappings that does not fit."""
    hint = type_of(job, key)
    if get_origin(hint) is list and is_dataclass(entry := get_args(hint)[0]):
        return type_name(hint) + _unfit(entry, value)
    inside = optional_inside(hint) or hint
    names = [m.name for m in inside] if isinstance(inside, type) and issubclass(inside, Enum) else []
    return type_name(hint) + did_you_mean(str(value), names)


def _unfit(entry: type, value: Any) -> str:
    """The first key, of a list of mappings that should be `entry`s, that is unknown; else what keys there are."""
    names = [f.name for f in fields(entry)]
    for mapping in value if isinstance(value, list) else []:
        for name in mapping if isinstance(mapping, dict) else []:
            if name not in names:
                return f": unknown key {name}{did_you_mean(name, names)}"
    types_ = ", ".join(f"{name}: {type_name(hint)}" for name, hint in get_type_hints(entry).items())
    return f" of {{{types_}}}"


def did_you_mean(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def unknown_key(job: type, key: str) -> str:
    """Why a key is not known, and the nearest one that is."""
    known = list(docs(job))
    owners = [name for name, other in JOBS.items() if ".".join(key.split(".")[:2]) in docs(other)]
    if owners:
        return f"unknown key {key}: it belongs to the {owners[0]} job"
    same_name = [k for k in known if k.split(".")[1] == key.split(".")[-1]]
    near = same_name[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if near:
        return f"unknown key {key}: did you mean {near[0]}?"
    group = key.split(".")[0]
    inside = [k for k in known if k.startswith(group + ".")]
    return f"unknown key {key}: " + (
        f"{group} has {', '.join(k.split('.')[1] for k in inside)}"
        if inside
        else f"the groups are {', '.join(groups(job))}"
    )
