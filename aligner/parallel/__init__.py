"""Megatron's groups, start-up, collectives. Importing this package installs the CPU adaptation of megatron-core where there is no GPU."""

from aligner.parallel import device as device  # first: every later megatron import must see the adapted modules
