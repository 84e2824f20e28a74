"""The Dockerfile, its helper and the version matrix of docs/containers.md agree with setup.py and constraints.txt."""

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "launch" / "containers"
PAGE = (ROOT / "docs" / "containers.md").read_text()
VERSIONS = runpy.run_path(str(CONTAINERS / "versions.py"))
INSTALLS = {canonicalize_name(r.name): r for r in VERSIONS["requirements"]()}


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (CONTAINERS / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [(word, " ".join(rest.split())) for word, _, rest in (line.partition(" ") for line in lines)]


def matrix() -> dict[str, list[str]]:
    """Package -> cells of its row in the page's version matrix."""
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")]
        for line in PAGE.splitlines()
        if line.startswith("| `")
    ]
    return {canonicalize_name(row[0]): row[1:] for row in rows if len(row) == 5}


def test_every_tested_version_lies_in_its_range():
    tested = VERSIONS["tested"]()
    for name, requirement in INSTALLS.items():
        assert requirement.specifier.contains(tested[name], prereleases=True), (
            f"{requirement}, and {tested[name]} is tested"
        )


def test_the_dockerfile_builds_on_nvidia_s_image_and_checks_what_it_made():
    found = instructions()
    assert [word for word, _ in found] == ["ARG", "FROM", "WORKDIR", *["COPY"] * 5, "RUN", "RUN", "ENV"]
    assert (
        re.fullmatch(r"BASE_IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", found[0][1])
        and found[1][1] == "${BASE_IMAGE}"
    )
    install, check = [rest for word, rest in found if word == "RUN"]
    assert (
        "versions.py pins /etc/pip/constraint.txt" in install
        and "pip install --no-cache-dir -c /tmp/pins.txt -e ." in install
    )
    assert check.endswith("python launch/containers/versions.py check")
    assert not re.search(r"[\w-]+==\d", install), "versions stand in constraints.txt alone"
    for _, rest in [pair for pair in found if pair[0] == "COPY"]:
        for source in rest.split()[:-1]:
            assert list(ROOT.glob(source)), f"COPY of {source}, which is not there"


def test_what_is_not_built_says_so():
    assert (CONTAINERS / "Dockerfile").read_text().startswith("# NOT BUILT YET")
    assert "**Not built yet.**" in PAGE


def test_pins_keep_what_the_image_has_and_setup_py_allows():
    has = {"torch": "2.10.0a0+b4e4ee81d3", "numpy": "2.1.0", "transformers": "4.57.3", "hydra-core": "1.2.0"}
    image = ["# NVIDIA's", "torch==2.10.0a0+b4e4ee81d3", "numpy==2.1.0", "Jinja2==3.1.6", "", "dllogger @ file:///x"]
    found = VERSIONS["pins"](image, has.get)
    assert found[:2] == ["Jinja2==3.1.6", "dllogger @ file:///x"]
    pinned = dict(line.split("==") for line in found[2:])
    assert pinned.keys() == INSTALLS.keys()
    tested = VERSIONS["tested"]()
    kept = {"torch": has["torch"], "transformers": "4.57.3"}
    assert pinned == {name: tested[name] for name in INSTALLS} | kept
    assert Requirement("numpy<2").specifier.contains(pinned["numpy"])


def test_what_is_installed_here_fits_and_a_misfit_is_told():
    assert VERSIONS["misfits"]() == []
    at = {"numpy": "2.1.0", "torch": "2.10.0a0+b4e4ee81d3", "rich": None}
    tested = VERSIONS["tested"]()
    assert VERSIONS["misfits"](lambda name: at.get(name, tested[canonicalize_name(name)])) == [
        "numpy 2.1.0 is installed, and setup.py needs numpy<2,>=1.26",
        "rich is not installed, and setup.py needs rich>=13",
    ]


@pytest.mark.parametrize("name", ["torch", "megatron-core", "nvidia-pytriton", "numpy", "transformers"])
def test_the_matrix_says_what_the_two_files_say(name):
    allowed, tested, *_ = matrix()[name]
    assert Requirement(f"{name}{allowed}").specifier == INSTALLS[name].specifier
    assert tested == VERSIONS["tested"]()[name]


def test_the_matrix_has_the_packages_that_come_from_containers_and_the_image():
    assert {"transformer-engine", "apex", "tensorrt-llm"} <= matrix().keys()
    base = dict(pair.split("=", 1) for word, pair in instructions() if word == "ARG")["BASE_IMAGE"]
    assert f"`{base}`" in PAGE
    others = re.findall(r"BASE_IMAGE=(nvcr\.io\S+release:\S+)", (CONTAINERS / "Dockerfile").read_text())
    assert others and all(f"`{other}`" in PAGE for other in others)
