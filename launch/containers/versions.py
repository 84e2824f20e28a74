"""Versions in a container: what pip may change while this package is installed, and whether what is there fits.

    python versions.py pins /etc/pip/constraint.txt     constraints for pip: the image's, and the tested versions of what it lacks
    python versions.py check                            every requirement of setup.py against what is installed; 1 where one does not fit

Facts live in two files: setup.py says what may work, constraints.txt what is tested on a CPU."""

import ast
import importlib.metadata
import sys
from pathlib import Path
from typing import Callable, Iterable, Optional

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

SHOWN = (
    "torch",
    "transformer-engine",
    "apex",
    "tensorrt-llm",
    "megatron-core",
    "nvidia-pytriton",
    "numpy",
    "transformers",
)


def requirements() -> list[Requirement]:
    """install_requires of setup.py."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (found,) = [
        k.value for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "install_requires"
    ]
    return [Requirement(text) for text in ast.literal_eval(found)]


def tested() -> dict[str, str]:
    """Package -> the version that constraints.txt pins."""
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def installed(name: str) -> Optional[str]:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins(image: Iterable[str], version_of: Callable[[str], Optional[str]] = installed) -> list[str]:
    """Constraints for `pip install .` in an image whose own are the lines of `image`. What the image has and setup.py allows stays (its
    own TensorRT-LLM needs its own transformers); the rest of our requirements gets the tested version."""
    versions = tested()
    ours = {}
    for requirement in requirements():
        name, there = canonicalize_name(requirement.name), version_of(requirement.name)
        fits = there is not None and requirement.specifier.contains(there, prereleases=True)
        ours[name] = there if fits else versions[name]
    kept = [line.strip() for line in image if line.strip() and not line.lstrip().startswith(("#", "-"))]
    theirs = [line for line in kept if canonicalize_name(Requirement(line).name) not in ours]
    return [*theirs, *(f"{name}=={version}" for name, version in ours.items())]


def misfits(version_of: Callable[[str], Optional[str]] = installed) -> list[str]:
    """A sentence for each requirement that what is installed does not meet. NVIDIA's pre-releases (2.10.0a0+b4e4ee8) count."""
    found = []
    for requirement in requirements():
        version = version_of(requirement.name)
        if version is None:
            found.append(f"{requirement.name} is not installed, and setup.py needs {requirement}")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is installed, and setup.py needs {requirement}")
    return found


def main(words: list[str]) -> int:
    if len(words) == 2 and words[0] == "pins":
        file = Path(words[1])
        print("\n".join(pins(file.read_text().splitlines() if file.exists() else [])))
        return 0
    if words == ["check"]:
        for name in SHOWN:
            print(f"{name:20} {installed(name) or 'absent'}")
        problems = misfits()
        print("\n".join(problems), file=sys.stderr)
        return 1 if problems else 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
