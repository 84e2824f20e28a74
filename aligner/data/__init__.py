"""Typed batches, prompts, tokenizer, sampler and the Protocols between parts."""
