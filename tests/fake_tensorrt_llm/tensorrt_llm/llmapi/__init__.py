from tensorrt_llm._contract import Settings


class SamplingParams(Settings):
    pass


class KvCacheConfig(Settings):
    pass


class CudaGraphConfig(Settings):
    pass
