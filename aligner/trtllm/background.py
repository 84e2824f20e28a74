"""One asyncio loop in a thread of its own: TensorRT-LLM's API is asynchronous, the trainer is not. Every wait has a deadline."""

import asyncio
import concurrent.futures
import threading
from typing import Any, Coroutine, TypeVar

T = TypeVar("T")

JOIN_SECONDS = 10.0


class BackgroundLoop:
    """Runs coroutines, all in one thread."""

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout: float) -> T:
        """Wait for its result. RuntimeError, naming `what`, where it fails or takes longer than `timeout` seconds."""
        future = self.spawn(coroutine)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError as late:
            if future.done():  # its own, not ours
                raise RuntimeError(f"{what} failed: {late!r}") from late
            future.cancel()
            raise RuntimeError(f"{what} did not end within {timeout:g} s (engine.timeout)") from None
        except Exception as error:
            raise RuntimeError(f"{what} failed: {error or repr(error)}") from error

    def close(self) -> None:
        """End the thread; what still runs is cancelled. Again is harmless."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join(JOIN_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)
