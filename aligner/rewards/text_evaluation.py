"""Which reasoning-gym scorers evaluate text: some pass a response to eval or to sympy's parser, which runs code."""

import ast
import inspect
import textwrap
from typing import Any, Callable, Iterator, Optional

EVALUATORS = {"eval", "exec", "__import__", "import_module", "system", "popen", "Popen", "check_output", "lambdify"}
EVALUATORS |= {
    "parse_expr",
    "sympify",
    "simplify",
    "expand",
    "factor",
    "Poly",
    "S",
    "parse_latex",
    "solve",
}  # sympy parses strings
OURS = "reasoning_gym"


def evaluating_call(dataset_class: type) -> Optional[str]:
    """The first call that evaluates text within score_answer of a reasoning-gym dataset class, or within what it calls inside
    reasoning_gym, as "function: call"; None where there is none.

    A name is enough: a scorer that only evaluates its own answer is listed too, and one that hands scoring to other datasets."""
    pending, seen = [dataset_class.score_answer], set()
    while pending:
        function = pending.pop()
        if function in seen:
            continue
        seen.add(function)
        for call in _calls(function):
            name = _name(call)
            target = _target(call, function, dataset_class)
            if target is not None:
                pending += _functions(target)
            elif name in EVALUATORS or name == "score_answer":
                return f"{function.__qualname__}: {ast.unparse(call)}"
    return None


def _calls(function: Callable) -> Iterator[ast.Call]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _name(call: ast.Call) -> str:
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def _target(call: ast.Call, function: Callable, dataset_class: type) -> Any:
    """What the call reaches inside reasoning_gym; None where it leaves it or cannot be told."""
    if isinstance(call.func, ast.Name):
        found = function.__globals__.get(call.func.id)
    elif isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name):
        owner = call.func.value.id
        holder = dataset_class if owner in ("self", "cls") else function.__globals__.get(owner)
        found = getattr(holder, call.func.attr, None)
    elif isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "super()":
        found = next((vars(c)[call.func.attr] for c in dataset_class.__mro__[1:] if call.func.attr in vars(c)), None)
    else:
        found = None
    inside = (getattr(found, "__module__", None) or "").split(".")[0] == OURS
    return found if inside and (inspect.isfunction(found) or inspect.isclass(found)) else None


def _functions(target: Any) -> list[Callable]:
    if inspect.isclass(target):
        return [f for f in vars(target).values() if inspect.isfunction(f) and f.__module__.split(".")[0] == OURS]
    return [target]
