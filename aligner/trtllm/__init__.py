"""TensorRT-LLM behind the engine contract."""
