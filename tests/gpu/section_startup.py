"""Process groups of one rank on the device's own backend, and what the machine has."""

import importlib.metadata
import importlib.util
import platform
import time

from gpu_models import one_rank

PACKAGES = ("torch", "transformers", "megatron-core", "transformer-engine", "apex", "numpy", "triton", "flash-attn")
ABSENT_IS_FINE = ("psutil", "einops", "rich", "tensorboard", "reasoning_gym", "pytriton", "matplotlib")


def startup(section) -> None:
    import torch
    import torch.distributed as dist

    facts = section.facts
    facts["python"] = platform.python_version()
    facts["packages"] = {name: version_of(name) for name in PACKAGES}
    facts["absent"] = [name for name in ABSENT_IS_FINE if importlib.util.find_spec(name) is None]
    if section.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = (
            f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, sm_{properties.major}{properties.minor}"
        )
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))

    from aligner.models.optimizer import _TORCH_ADAM
    from aligner.models.spec import has_transformer_engine
    from aligner.parallel.collectives import broadcast_object, gather_objects
    from aligner.parallel.device import BACKEND, DEVICE, ON_GPU, fastest_dtype, synchronise
    from aligner.parallel.startup import shutdown, start

    section.expect(section.on_gpu == ON_GPU, f"aligner.parallel.device.ON_GPU is {ON_GPU}")
    facts |= {"backend": BACKEND, "auto_dtype": str(fastest_dtype())}
    facts |= {"transformer_engine": has_transformer_engine(), "adam": "torch" if _TORCH_ADAM else "fused"}
    began = time.perf_counter()
    topology = start(one_rank(), seed=1)
    x = torch.arange(1 << 20, dtype=torch.float32, device=DEVICE)
    before = x.clone()
    for group in (topology.world_group, topology.tensor_group, topology.data_group, topology.model_group):
        dist.all_reduce(x, group=group)
    synchronise()
    facts["start_seconds"] = round(time.perf_counter() - began, 2)
    section.expect(torch.equal(x, before), "an all_reduce over one rank changed the tensor")
    section.expect(dist.get_backend() == BACKEND, f"the default group's backend is {dist.get_backend()}, not {BACKEND}")
    section.expect(gather_objects({"a": 1}, topology.cpu_group) == [{"a": 1}], "gather_objects over the gloo group")
    section.expect(broadcast_object("x", 0, topology.cpu_group) == "x", "broadcast_object over the gloo group")
    start(one_rank(), seed=2)  # a second grid in the same process
    shutdown()


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
