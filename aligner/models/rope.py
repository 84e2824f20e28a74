"""Frequencies of the rotary position embedding, the same for training and for the engine."""

import math

import torch
from torch import Tensor


def llama3_frequencies(inv_freq: Tensor, scaling: dict) -> Tensor:
    """Llama 3's scaled rotary frequencies: long wavelengths are divided by `factor`, short ones kept, those between interpolated.

    inv_freq [D/2] float32 -> [D/2]. After transformers' modeling_rope_utils._compute_llama3_parameters; megatron-core's own fixes all
    but the factor."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_length = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (old_length / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > old_length / low, inv_freq / factor, inv_freq)
    return torch.where((wavelength <= old_length / low) & (wavelength >= old_length / high), between, scaled)
