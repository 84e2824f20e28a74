"""kernels/native.c: compiled once for this machine, and the calls into it. Where there is no C compiler the engine uses torch's kernels."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

KERNELS = Path(__file__).with_name("kernels")
SOURCE = KERNELS / "native.c"
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
COMPILE_DEADLINE = 120  # seconds
PANEL_TOKENS = 8 * 2 * 16  # GROUP * WIDTH of kernels/linear.h, at most
SAMPLING_BLOCK = 256  # BLOCK of kernels/sampling.h


class CLinear(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("out", c_int64), ("in_", c_int64)]


class CLayer(Structure):
    _fields_ = [
        *((name, CLinear) for name in ("qkv", "out", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "attention_shift", "mlp_norm", "mlp_shift", "qk_norms")),
    ]


class CModel(Structure):
    _fields_ = [
        *((k, c_int64) for k in ("layers", "hidden", "heads", "groups", "dim", "ffn", "vocab", "rows", "length")),
        *((name, c_int32) for name in ("use_bf16", "gated")),
        *((name, c_float) for name in ("eps", "scale")),
        ("layer", POINTER(CLayer)),
        ("head", CLinear),
        *((name, c_void_p) for name in ("embedding", "positions", "final_norm", "final_shift", "cosines", "sines")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((k, c_void_p) for k in ("x", "normed", "qkv", "attended", "up", "panel", "scores")),
        ("capacity", c_int64),
    ]


def pointer(tensor: Optional[Tensor]) -> Optional[int]:
    return None if tensor is None else tensor.data_ptr()


def c_linear(weight: Tensor, bias: Optional[Tensor]) -> CLinear:
    return CLinear(pointer(weight), pointer(bias), *weight.shape)


@functools.cache
def library() -> Optional[ctypes.CDLL]:
    """The compiled kernels, or None (with one line in the log) where they cannot be had."""
    try:
        loaded = ctypes.CDLL(str(_compiled()))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.info("the rollout engine uses torch's kernels, which are slower: %s", error)
        return None
    loaded.forward.argtypes = [POINTER(CModel), c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p]
    loaded.sample.argtypes = [c_void_p, c_int64, c_int64, *[c_void_p] * 5]
    loaded.linear.argtypes = [POINTER(CLinear), c_void_p, c_int64, c_void_p, c_int32, c_int32, c_void_p]
    for function in (loaded.forward, loaded.sample, loaded.linear):
        function.restype = None
    return loaded


def _compiled() -> Path:
    """native.c as a shared library in the user's cache, under a name that says source, compiler and processor."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise RuntimeError("there is no C compiler (gcc) to build aligner/rollout/kernels with")
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_DEADLINE).stdout
    sources = [path.read_bytes() for path in sorted(KERNELS.iterdir())]
    key = hashlib.sha256(b"\n".join([*sources, version, *map(str.encode, FLAGS), _processor()]))
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aligner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="aligner-"))
    target = folder / f"native-{key.hexdigest()[:16]}.so"
    if not target.is_file():
        # Several ranks may do this at once: the last rename stays.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *FLAGS, "-o", str(built), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_DEADLINE)
            if done.returncode:
                raise RuntimeError(f"{compiler} refused native.c: {done.stderr.strip()[:500]}")
            built.rename(target)
    return target


def _processor() -> bytes:
    """What -march=native depends on: a home folder may be shared by unlike machines."""
    lines = Path("/proc/cpuinfo").read_bytes().splitlines() if Path("/proc/cpuinfo").is_file() else []
    return b"\n".join(sorted({line for line in lines if line.startswith((b"flags", b"model name", b"Features"))}))


def linear(x: Tensor, weight: Tensor, panel: Tensor) -> Tensor:
    """x [n, in] W^T by the compiled kernel, for the micro-timing and the tests; panel: PANEL_TOKENS * in float32."""
    y = torch.empty(x.size(0), weight.size(0))
    is_bf16 = int(weight.dtype == torch.bfloat16)
    library().linear(byref(c_linear(weight, None)), pointer(x), x.size(0), pointer(y), 0, is_bf16, pointer(panel))
    return y


class Sampler:
    """sampling.sample without truncation. Its arrays are made once: looking up an array's address takes longer than a short kernel."""

    def __init__(self, rows: int, vocab_size: int):
        self.vocab_size = vocab_size
        self.uniforms, self.temperature, self.logprobs = (np.zeros(rows, np.float32) for _ in range(3))
        self.tokens, self.blocks = np.zeros(rows, np.int64), np.zeros((rows, -(-vocab_size // SAMPLING_BLOCK)))
        used = (self.uniforms, self.temperature, self.tokens, self.logprobs, self.blocks)
        self.addresses = [array.ctypes.data for array in used]

    def __call__(
        self, logits: Tensor, *, uniforms: np.ndarray, temperature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """tokens [n] int64 and log-probs [n] float32 of logits [n, V] float32, which stay; overwritten by the next call."""
        n = len(uniforms)
        self.uniforms[:n], self.temperature[:n] = uniforms, temperature
        library().sample(logits.data_ptr(), n, self.vocab_size, *self.addresses)
        return self.tokens[:n], self.logprobs[:n]
