from enum import Enum

from tensorrt_llm._contract import TAGS, Settings

ExecutorMemoryType = Enum("ExecutorMemoryType", TAGS)


class SleepConfig(Settings):
    pass
