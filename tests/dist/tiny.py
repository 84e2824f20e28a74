"""Tiny Hugging Face models of each family with non-trivial norms and biases, and their ModelShape."""

import torch


def tiny_hf(family: str, *, tied: bool, layers: int = 4, vocab: int = 200, seed: int = 0):
    """(transformers model in float32 with SDPA attention, ModelShape)."""
    import transformers

    from aligner.models.hf_config import shape_of

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[family]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
    }
    if family == "gpt2":
        sizes |= {"n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "rms_norm_eps": 1e-5}
    config = config_class(
        **sizes,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        initializer_range=0.08,
        **({"head_dim": 32} if family == "qwen3" else {}),
    )
    torch.manual_seed(seed)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or ".ln_" in name:
                parameter.copy_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model, shape_of(config.to_dict())


def weights_of(model) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its checkpoint (a tied lm head is not one)."""
    names = model.state_dict()
    if model.config.tie_word_embeddings:
        names.pop("lm_head.weight", None)
    return dict(names)
