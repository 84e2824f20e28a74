"""megatron-core on a CPU: what it takes for a library written for CUDA to run with gloo. Never used where a GPU is present.

Within megatron.core modules the name `torch` is replaced by a proxy whose cuda functions do nothing and whose factories map "cuda" to
the CPU. Process-wide, Tensor.cuda becomes the identity (without CUDA it could only raise). Verified against one version only, so
install() refuses another, and refuses when a symbol that it replaces is gone."""

import contextlib
import functools
import importlib
import sys
import types
import warnings
from importlib.metadata import version

import torch

from aligner.parallel.cpu_linear import megatron_linear
from aligner.parallel.cpu_swiglu import megatron_swiglu

VERSION = "0.16.1"
_CPU = torch.device("cpu")

# Each is imported before the proxy goes in; one imported later would keep the real torch and fail at its first cuda call.
_MODULES = (
    "megatron.core.tensor_parallel",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.distributed",
    "megatron.core.distributed.finalize_model_grads",
    "megatron.core.optimizer",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.optimizer.optimizer",
    "megatron.core.optimizer.clip_grads",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.async_utils",
    "megatron.core.dist_checkpointing.strategies.filesystem_async",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.state_dict_saver",
)

_PATCHED = {
    "megatron.core.jit": ("disable_jit_fuser",),
    "megatron.core.optimizer.optimizer": ("Float16OptimizerWithFloat16Params", "clip_grad_by_total_norm_fp32"),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer",),
    "megatron.core.optimizer.clip_grads": ("clip_grad_by_total_norm_fp32",),
    "megatron.core.tensor_parallel.layers": (
        "linear_with_frozen_weight",
        "linear_with_grad_accumulation_and_async_allreduce",
    ),
    "megatron.core.tensor_parallel.random": ("_get_cuda_rng_state", "_set_cuda_rng_state", "CudaRNGStatesTracker"),
    "megatron.core.transformer.mlp": ("bias_swiglu_impl",),
}


class _Stream:
    """Stands for torch.cuda.Stream and Event: on a CPU everything is already in order."""

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def query(self) -> bool:
        return True

    def record_event(self, *args):
        return self

    def record(self, *args):
        return None

    wait_stream = wait_event = synchronize = wait = record


class _Namespace(types.ModuleType):
    """A module with some names replaced; all others are read from, and written to, the wrapped module."""

    def __init__(self, base, **replaced):
        super().__init__(base.__name__)
        self.__dict__["_base"] = base
        self.__dict__.update(replaced)

    def __getattr__(self, name):
        return getattr(self.__dict__["_base"], name)

    def __setattr__(self, name, value):
        setattr(self.__dict__["_base"], name, value)


def _nothing(*args, **kwargs):
    return None


def _on_cpu(factory):
    @functools.wraps(factory)
    def wrapped(*args, **kwargs):
        device = kwargs.get("device")
        if device is not None and not isinstance(device, torch.device) and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return wrapped


def _torch_proxy() -> _Namespace:
    cuda = _Namespace(
        torch.cuda,
        **dict.fromkeys(("synchronize", "empty_cache", "set_device", "manual_seed"), _nothing),
        current_device=lambda: _CPU,
        Stream=_Stream,
        Event=_Stream,
        stream=lambda stream: contextlib.nullcontext(),
        current_stream=_Stream,
        default_stream=_Stream,
        memory_allocated=lambda *args: 0,
        max_memory_allocated=lambda *args: 0,
        nvtx=types.SimpleNamespace(range_push=_nothing, range_pop=_nothing),
    )
    factories = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "rand", "randn")
    return _Namespace(torch, cuda=cuda, **{name: _on_cpu(getattr(torch, name)) for name in factories})


@contextlib.contextmanager
def _cuda_type_names():
    """Optimizers compare Tensor.type() with "torch.cuda.FloatTensor" and its kin; inside this block CPU tensors answer so."""
    original = torch._C.TensorBase.type

    def type_(self, *args, **kwargs):
        answer = original(self, *args, **kwargs)
        return answer.replace("torch.", "torch.cuda.", 1) if not args and not kwargs else answer

    torch.Tensor.type = type_
    try:
        yield
    finally:
        del torch.Tensor.type


def _with_cuda_type_names(function):
    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with _cuda_type_names():
            return function(*args, **kwargs)

    return wrapped


def _set_main_param_and_optimizer_states(self, model_param, tensors):
    """For torch's Adam, whose `step` is no tensor of the checkpoint: megatron's own version looks it up there and fails."""
    group, index = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][index]
    for name, target in {"param": main, **self.optimizer.state[main]}.items():
        if name in tensors:
            target.copy_(tensors[name])


def _patch_optimizers() -> None:
    from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer

    for cls in (optimizer.Float16OptimizerWithFloat16Params, distrib_optimizer.DistributedOptimizer):
        cls.__init__ = _with_cuda_type_names(cls.__init__)
    clip = _with_cuda_type_names(clip_grads.clip_grad_by_total_norm_fp32)
    clip_grads.clip_grad_by_total_norm_fp32 = optimizer.clip_grad_by_total_norm_fp32 = clip
    repair_loading_of_torch_adam()


def repair_loading_of_torch_adam() -> None:
    """Sharded optimizer states load into torch's Adam too; on a GPU that has neither Transformer Engine nor apex as well."""
    from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, distrib_optimizer

    if USING_PYTORCH_OPTIMIZER:
        distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = (
            _set_main_param_and_optimizer_states
        )


def _patch_random() -> None:
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """Named states of torch's CPU generator, instead of the CUDA one's."""

        def add(self, name, seed):
            self._is_initialized = True
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"random state {name!r} or seed {seed} exists already")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator("cpu").manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name="model-parallel-rng"):
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random.CudaRNGStatesTracker = CpuRNGStatesTracker


def _patch_layers() -> None:
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import mlp

    layers.linear_with_frozen_weight = megatron_linear
    layers.linear_with_grad_accumulation_and_async_allreduce = megatron_linear
    mlp.bias_swiglu_impl = megatron_swiglu


def _check_symbols() -> None:
    if (found := version("megatron-core")) != VERSION:
        raise RuntimeError(
            f"on a CPU megatron-core must be {VERSION}, found {found}: pip install megatron-core=={VERSION}"
        )
    missing = [f"{m}.{n}" for m, names in _PATCHED.items() for n in names if not hasattr(importlib.import_module(m), n)]
    distributed = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    if not hasattr(distributed, "_set_main_param_and_optimizer_states"):
        missing.append("DistributedOptimizer._set_main_param_and_optimizer_states")
    if missing:
        raise RuntimeError(f"megatron-core {VERSION} lacks {', '.join(missing)}, which its CPU adaptation replaces")


def _silence_known_warnings() -> None:
    """What megatron-core says of parts that a CPU cannot have, and torch of the collectives that megatron-core calls."""
    known = (
        (r"`load_state_dict` is deprecated and will be removed in future versions.*", FutureWarning),
        (r"Please use DTensor instead and we are deprecating ShardedTensor.*", FutureWarning),
        (r".*Apex (is|are) not installed.*", UserWarning),
        (r".*recommended to set the environment variable CUDA_DEVICE_MAX_CONNECTIONS.*", UserWarning),
        (r"`torch\.distributed\.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated.*", FutureWarning),
    )
    for message, category in known:
        warnings.filterwarnings("ignore", message=message, category=category)


@contextlib.contextmanager
def _without_compilation():
    """The first import of megatron.core decorates functions with torch.compile, which imports the whole compiler: 2 s for nothing."""
    original = torch.compile
    torch.compile = lambda model=None, **how: model if model is not None else lambda function: function
    try:
        yield
    finally:
        torch.compile = original


def install() -> None:
    """Adapt megatron-core to this CPU. Safe to call again; raises RuntimeError for another version of it."""
    _silence_known_warnings()
    with _without_compilation():
        from megatron.core import jit

    if getattr(jit, "aligner_cpu", False):
        return
    jit.disable_jit_fuser()  # before the other imports, whose decorators bind it: compiling ten tiny functions takes minutes
    for name in _MODULES:
        importlib.import_module(name)
    _check_symbols()
    proxy = _torch_proxy()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = proxy
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # tied embeddings on the last stage call it
    _patch_optimizers()
    _patch_random()
    _patch_layers()
    jit.aligner_cpu = True
