"""TRL's own environment, made once: .cache/trl-venv, so that neither side of a benchmark constrains the other's packages.

    python benchmarks/trl_env.py        (prints the interpreter's path)

TRL 1.12.0 is the last release with a PPO trainer (trl.experimental.ppo)."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "trl-venv"
TRL = "trl==1.12.0"
# What TRL's PPO trainer imports. torch and transformers are this environment's own versions: both sides call the same kernels.
DEPENDENCIES = ("datasets==5.2.0", "accelerate==1.15.0")
SAME_VERSION = ("torch", "transformers", "tokenizers", "safetensors")


def trl_python() -> Path:
    """The interpreter of TRL's environment; makes the environment where it is absent or was made for other versions."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".made-for"
    wanted = [*(f"{name}=={version(name).split('+')[0]}" for name in SAME_VERSION), *DEPENDENCIES]
    if stamp.exists() and stamp.read_text() == "\n".join([TRL, *wanted]):
        return python
    print(f"making TRL's environment in {FOLDER} (once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(FOLDER)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *wanted], check=True, stdout=sys.stderr)
    subprocess.run([*install, "--no-deps", TRL], check=True, stdout=sys.stderr)
    stamp.write_text("\n".join([TRL, *wanted]))
    return python


if __name__ == "__main__":
    print(trl_python())
