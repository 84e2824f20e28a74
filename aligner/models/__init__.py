"""megatron-core models: building, running, training, saving and converting them."""
