"""Check, before anything is installed, that this machine can run the jobs: one line for each thing that is missing.

Standard library only."""

import argparse
import os
import platform
import shutil
import sys
import sysconfig

GB = 1024**3


def problems(root: str, disk_gb: float, memory_gb: float) -> list[str]:
    found = []
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        found.append(
            f"needs Linux on x86-64 (PyTriton ships its server for nothing else); this is {system} on {machine}"
        )
    version = sys.version_info[:2]
    if not (3, 10) <= version < (3, 13):
        found.append(
            f"needs Python 3.10 to 3.12; {sys.executable} is {version[0]}.{version[1]}: run `make PYTHON=/path/to/python3.11 ...`"
        )
    elif not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        found.append(
            f"needs a Python with a shared libpython (PyTriton loads it); {sys.executable} was built without --enable-shared: "
            "use the distribution's python3, or `PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install 3.11`"
        )
    free = shutil.disk_usage(root).free / GB
    if free < disk_gb:
        found.append(f"needs {disk_gb:.0f} GB of free disk at {root}; {free:.1f} GB are free")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    if total < memory_gb:
        found.append(f"needs {memory_gb:.0f} GB of memory; this machine has {total:.1f} GB")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", help="folder of the checkout, whose disk is checked")
    parser.add_argument("--disk_gb", type=float, default=10, help="free disk needed, GB")
    parser.add_argument("--memory_gb", type=float, default=12, help="memory needed, GB")
    args = parser.parse_args()
    found = problems(args.root, args.disk_gb, args.memory_gb)
    for problem in found:
        print(f"preflight: {problem}", file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
