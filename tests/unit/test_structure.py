"""The folders draw the architecture: who may import whom, and how long files and functions are. Read from the source, nothing is run."""

import ast
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "aligner"
MODULES = sorted(PACKAGE.rglob("*.py"))

# folder -> folders that it may import, besides itself. `runtime` and `config` stand beside each other: anything may import them
ORDER = ["ops", "parallel", "data", "models"]
MAY_IMPORT = {
    "config": {"runtime"},
    "runtime": {"config"},
    **{folder: {"config", "runtime", *ORDER[:i]} for i, folder in enumerate(ORDER)},
    "rollout": {"config", "runtime", *ORDER},
    "serving": {"config", "runtime", *ORDER},
    "rewards": {"config", "runtime", *ORDER},
    "trtllm": {"config", "runtime", *ORDER, "rollout"},
    "algorithms": {"config", "runtime", *ORDER, "rollout", "serving", "rewards", "trtllm"},
}

# library -> the folders that may know it: what is replaced is replaced in one place
HOMES = {
    "hydra": {"config"},
    "omegaconf": {"config"},
    "megatron": {"parallel", "models"},
    "pytriton": {"serving"},
    "tritonclient": {"serving"},
    "prometheus_client": {"serving"},
    "tensorrt_llm": {"trtllm"},
    "transformers": {"data"},
    "reasoning_gym": {"data", "rewards"},
    "math_verify": {"rewards"},
    "wandb": {"runtime"},
    "rich": {"runtime"},
}
INSIDE_FUNCTIONS_ONLY = {
    "tensorrt_llm",
    "transformer_engine",
    "apex",
    "wandb",
}  # absent on the machines where most of this is written

# The algorithms know the Protocols of aligner/data/interfaces.py; entry scripts know the parts
PARTS = (
    "aligner.rollout.torch_engine",
    "aligner.trtllm",
    "aligner.serving.server",
    "aligner.serving.client",
    "aligner.serving.local",
)

MAX_FILE, MAX_FUNCTION, P90_FUNCTION = 330, 60, 30  # about 300
LONG_FILES = {"config/groups.py": "every setting with its documentation: one list to read"}
LONG_FUNCTIONS: dict[str, str] = {}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every (statement, dotted module or name) that a module imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def functions(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, lines without the docstring) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = node.body[0] if ast.get_docstring(node) else None
            said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            yield node.name, node.end_lineno - node.lineno + 1 - said


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports(path):
    folder, tree = path.relative_to(PACKAGE).parts[0], ast.parse(path.read_text())
    if folder == "__init__.py":
        assert list(imports(tree)) == [], "importing aligner alone loads nothing"
        return
    for statement, module in imports(tree):
        where = f"{name_of(path)}:{statement.lineno} imports {module}"
        parts = module.split(".")
        if parts[0] == "aligner" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
            assert parts[1] in MAY_IMPORT[folder] | {folder}, (
                f"{where}: {folder} may import {sorted(MAY_IMPORT[folder])}"
            )
        if parts[0] in HOMES:
            assert folder in HOMES[parts[0]], f"{where}: only {sorted(HOMES[parts[0]])} may"
        if parts[0] in INSIDE_FUNCTIONS_ONLY:
            assert statement not in tree.body, f"{where} at module level: it may be absent"
        if folder == "algorithms":
            assert not module.startswith(PARTS), f"{where}: algorithms know the Protocols only"


def test_importing_a_light_folder_stays_light():
    """What entry scripts import before torch does not import it."""
    for light in ("exit_codes", "errors", "signals", "faults"):
        tree = ast.parse((PACKAGE / "runtime" / f"{light}.py").read_text())
        heavy = {m.split(".")[0] for statement, m in imports(tree) if statement in tree.body} & {
            "torch",
            "numpy",
            "hydra",
        }
        assert not heavy, f"runtime/{light}.py imports {heavy}"


def test_files_stay_short():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_FILE and name not in LONG_FILES}
    assert too_long == {}, f"longer than {MAX_FILE} lines; split them, or say in LONG_FILES why not"
    assert [name for name in LONG_FILES if lengths.get(name, 0) <= MAX_FILE] == [], "short again: off the list"


def test_functions_stay_short(record_property):
    found = {}
    for path in MODULES:
        for name, lines in functions(ast.parse(path.read_text())):
            found[f"{name_of(path)}:{name}"] = max(lines, found.get(f"{name_of(path)}:{name}", 0))
    ordered = sorted(found.values())
    p90 = ordered[int(len(ordered) * 0.9)]
    record_property("function_lines_p90", p90)
    too_long = {name: lines for name, lines in found.items() if lines > MAX_FUNCTION and name not in LONG_FUNCTIONS}
    assert too_long == {}, f"longer than {MAX_FUNCTION} lines; split them, or say in LONG_FUNCTIONS why not"
    assert p90 <= P90_FUNCTION, f"p90 of {len(ordered)} functions is {p90} lines"
    assert [name for name in LONG_FUNCTIONS if found.get(name, 0) <= MAX_FUNCTION] == [], "short again: off the list"


def test_entry_scripts_stay_thin():
    scripts = sorted(ROOT.glob("*.py"))
    long = {path.name: len(path.read_text().splitlines()) for path in scripts if path.name != "setup.py"}
    assert {name: lines for name, lines in long.items() if lines > 100} == {}, (
        "about 80 lines: a script wires the parts"
    )
