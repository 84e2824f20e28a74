"""What this project relies on of TensorRT-LLM, as a literal table: names, and the keywords of each. Whatever is not here raises.

Read from TensorRT-LLM's sources and from verl's and NeMo-RL's use of it; the package itself was never run."""

SIGNATURES = {
    "AsyncLLM": {
        *("model", "backend", "dtype", "load_format", "tensor_parallel_size", "max_batch_size", "max_input_len"),
        *(
            "max_seq_len",
            "max_num_tokens",
            "kv_cache_config",
            "cuda_graph_config",
            "sleep_config",
            "allreduce_strategy",
        ),
        "sampler_type",
    },
    "SamplingParams": {
        *(
            "end_id",
            "pad_id",
            "max_tokens",
            "stop",
            "stop_token_ids",
            "include_stop_str_in_output",
            "n",
            "top_k",
            "top_p",
        ),
        *("seed", "temperature", "logprobs", "ignore_eos", "detokenize"),
    },
    "KvCacheConfig": {"free_gpu_memory_fraction", "enable_block_reuse"},
    "CudaGraphConfig": {"enable_padding", "max_batch_size", "batch_sizes"},
    "SleepConfig": {"restore_modes"},
}
METHODS = {
    *("setup_async", "generate_async", "update_weights", "release", "resume", "collective_rpc", "pause_generation"),
    *("resume_generation", "shutdown"),
}
WORKER_METHODS = {"reset_prefix_cache"}
TAGS = {
    "MODEL_WEIGHTS_MAIN": "model_weights",
    "MODEL_ENGINE_MAIN": "model",
    "MODEL_ENGINE_DRAFT": "draft_model",
    "KV_CACHE": "kv_cache",
    "SAMPLER": "sampler",
    "DRAFTER": "drafter",
    "GUIDED_DECODER": "guided_decoder",
    "SPEC_RESOURCES": "spec_resource_manager",
    "MODEL_EXTRA": "model_extra",
    "EXTRA_RESOURCES": "executor_extra",
    "INIT_KV_CACHE": "_no_capture_init_kv_cache",
}


class Settings:
    """An object of keywords from the table; any other keyword or attribute raises."""

    def __init__(self, **given):
        name = type(self).__name__
        if unknown := sorted(given.keys() - SIGNATURES[name]):
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
        self.__dict__.update(given)

    def __getattr__(self, name):
        if name in SIGNATURES[type(self).__name__]:
            return
        raise AttributeError(f"{type(self).__name__} of the contract has no attribute {name!r}")


class Record:
    """An object of exactly these attributes."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def __getattr__(self, name):
        raise AttributeError(f"the contract has no attribute {name!r} here, only {sorted(self.__dict__)}")
