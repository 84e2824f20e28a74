"""PyTriton on rank 0: binding the three endpoints, ports, its workspace, and what a Python needs so that it starts at all."""

import contextlib
import functools
import logging
import os
import socket
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping, Optional, Sequence

from aligner.runtime.signals import kept_from_children
from aligner.serving import access, leftovers, protocol
from aligner.serving.protocol import Endpoint, Field

log = logging.getLogger(__name__)

EXIT_TIMEOUT = 5  # seconds that Triton waits for requests in flight when it ends
STOP_DEADLINE = 40.0
# To start Triton: the port it was told may be taken, and its Python backend crashes now and then while it loads
ATTEMPTS = 3
PATIENCE = 60.0  # seconds after which a start that failed is not tried again

Handler = Callable[[Sequence[Any]], list[dict[str, Any]]]


def check_python() -> None:
    """PyTriton's backend process embeds libpython. Raises ValueError where this Python has none to embed."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise ValueError(
            "this Python was built without a shared libpython, which PyTriton's backend needs; use one built with "
            "--enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install ...; Debian's python3 has it)"
        )


def free_port(address: str) -> int:
    """A port that nobody on `address` listens on now."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def check_port_free(address: str, port: int, *, key: str) -> None:
    """Raises ValueError naming the setting `key` where the port cannot be bound."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise ValueError(
                f"{key}={port} cannot be bound on {address} ({error.strerror}); set it to 0 to take a free port"
            ) from None


class TritonServer:
    """A running Triton with the given handlers. Start it from the main thread: Triton ends with the thread that started it."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        address: str,
        port: int,
        token: Optional[str],
        max_rows: int,
        queue_delay_us: int,
        log_file: Path,
        run: str,
    ) -> None:
        """port 0 takes a free one. run: what is served; leftovers of an earlier job of it are removed.

        Raises ValueError for an unusable Python or port, RuntimeError where Triton does not start."""
        check_python()
        if port:
            check_port_free(address, port, key="serving.port")
        leftovers.remove_abandoned(run)
        self.log_file = log_file
        self._settings = {
            "handlers": handlers,
            "address": address,
            "token": token,
            "max_rows": max_rows,
            "queue_delay_us": queue_delay_us,
        }
        log_file.parent.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for attempt in range(1, ATTEMPTS + 1):
            self.port = port or free_port(address)
            self._home = leftovers.make_workspace(run)
            with kept_from_children():
                self._guardian = leftovers.guard(self._home)
            try:
                with kept_from_children():
                    self._start()
                return
            except Exception as error:
                self.stop()
                told = f"Triton did not start on {address}:{self.port} ({error}); its log is {log_file}"
                if attempt == ATTEMPTS or time.monotonic() - began > PATIENCE:
                    raise RuntimeError(told) from error
                log.warning("%s; trying again", told)

    def _start(self) -> None:
        import sh
        from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

        _keep_signals_from_backends()
        # without it torchrun's killpg on SIGTERM takes Triton's helpers too, and requests in flight are lost
        sh.Command._call_args["new_group"] = True
        settings = self._settings
        address, token = settings["address"], settings["token"]
        self._triton = Triton(
            config=TritonConfig(
                allow_http=True,
                http_address=address,
                http_port=self.port,
                allow_grpc=False,
                allow_metrics=False,
                http_header_forward_pattern=access.TOKEN_HEADER,
                exit_timeout_secs=EXIT_TIMEOUT,
                log_file=self.log_file,
            ),
            security_config=TritonSecurityConfig(
                access_token=None if token is None else access.gate_of(token),
                restricted_endpoints=[
                    *(["inference"] if token else []),
                    *("model-repository", "shared-memory", "statistics", "trace", "logging"),
                ],
            ),
            workspace=self._home / "workspace",
        )
        for endpoint in protocol.ENDPOINTS:
            self._bind(endpoint)
        with _environment(self._home):
            self._triton.run()

    def _bind(self, endpoint: Endpoint) -> None:
        from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor

        def tensors(fields: Sequence[Field]) -> list[Any]:
            return [Tensor(name=f.name, dtype=f.dtype, shape=f.shape) for f in fields]

        batcher = DynamicBatcher(max_queue_delay_microseconds=self._settings["queue_delay_us"])
        config = (
            ModelConfig(max_batch_size=self._settings["max_rows"], batcher=batcher)
            if endpoint.batched
            else ModelConfig(batching=False, max_batch_size=0)
        )
        handler = self._settings["handlers"][endpoint.name]
        self._triton.bind(
            endpoint.name, handler, tensors(endpoint.inputs), tensors(endpoint.outputs), config=config, strict=True
        )

    def is_alive(self) -> bool:
        return self._triton.is_alive()

    def stop(self) -> None:
        """End Triton, which answers requests in flight first, and remove its workspace."""
        if hasattr(self, "_triton"):
            stopping = threading.Thread(target=self._triton.stop, daemon=True)
            stopping.start()
            stopping.join(STOP_DEADLINE)
            if stopping.is_alive():
                log.warning("Triton did not end within %.0f s; its log is %s", STOP_DEADLINE, self.log_file)
        leftovers.remove(self._home, os.getpid())
        self._guardian.kill()
        self._guardian.wait()


IGNORING = b"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
"""


def _keep_signals_from_backends() -> None:
    """Triton's backend processes start one each that holds their shared memory. multiprocessing unblocks signals for it (it starts its
    resource tracker first), which undoes kept_from_children; what is ignored stays so. Their own code is sent to Triton as a file."""
    from pytriton.models.model import Model

    files = Model.get_proxy_model_files
    if hasattr(files, "__wrapped__"):
        return

    @functools.wraps(files)
    def with_signals_ignored(model: Model) -> dict[str, bytes]:
        found = files(model)
        main = f"file:{model.model_version}/model.py"
        return {**found, main: found[main] + IGNORING}

    Model.get_proxy_model_files = with_signals_ignored


@contextlib.contextmanager
def _environment(home: Path) -> Iterator[None]:
    """What Triton's processes inherit: a mark by which they are found where this process is killed, the libpython of this interpreter
    first (its backend would load another of the same version), and no GPU (it would take memory on it)."""
    libraries = os.pathsep.join(filter(None, [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]))
    changes = {"LD_LIBRARY_PATH": libraries, "CUDA_VISIBLE_DEVICES": "", leftovers.MARK: str(home)}
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
