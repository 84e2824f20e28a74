"""A strict stand-in for TensorRT-LLM, for contract tests. It generates with a Hugging Face model that holds the weights it was sent."""

from tensorrt_llm._async_llm import AsyncLLM

__version__ = "1.3.0-fake"
__all__ = ["AsyncLLM", "__version__"]
