"""Aligner: align large language models with Megatron-native SPMD jobs and a served critic."""

__version__ = "0.1.0"
