"""TRL's own environments, made once under .cache/, so that neither side of a benchmark constrains the other's packages.

    python benchmarks/trl_env.py        (prints the path of the interpreter of PPO's)

TRL 1.12.0 is the last release with a PPO trainer (trl.experimental.ppo); GRPO is measured with a newer one."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache"
TRL_OF_PPO, TRL_OF_GRPO = "trl==1.12.0", "trl==1.16.0"
FOLDERS = {TRL_OF_PPO: CACHE / "trl-venv", TRL_OF_GRPO: CACHE / "trl-grpo-venv"}
# What TRL's trainers import. torch and transformers are this environment's own versions: both sides call the same kernels.
DEPENDENCIES = ("datasets==5.2.0", "accelerate==1.15.0")
SAME_VERSION = ("torch", "transformers", "tokenizers", "safetensors")


def trl_python(trl: str = TRL_OF_PPO) -> Path:
    """The interpreter of the environment of that version; makes it where it is absent or was made for other versions."""
    folder = FOLDERS[trl]
    python, stamp = folder / "bin" / "python", folder / ".made-for"
    wanted = [*(f"{name}=={version(name).split('+')[0]}" for name in SAME_VERSION), *DEPENDENCIES]
    if stamp.exists() and stamp.read_text() == "\n".join([trl, *wanted]):
        return python
    print(f"making TRL's environment in {folder} (once)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *wanted], check=True, stdout=sys.stderr)
    subprocess.run([*install, "--no-deps", trl], check=True, stdout=sys.stderr)
    stamp.write_text("\n".join([trl, *wanted]))
    return python


if __name__ == "__main__":
    print(trl_python())
