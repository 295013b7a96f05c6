"""Threads that run operations of torch each by itself, on one core.

torch parts every operation among the cores. Where many small ones are to be done that do not depend
on each other, as those of different draws, cores wait for each other less if each does its own.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

PartT = TypeVar("PartT")
ResultT = TypeVar("ResultT")

_pools: dict[int, ThreadPoolExecutor] = {}
_lock = threading.Lock()


def count(device: str) -> int:
    """How many threads would share work on a device: as many as torch uses for one operation.

    None but the caller's where it watches operations, which is by thread.
    """
    watched = bool(_get_current_dispatch_mode_stack())
    return 1 if device != "cpu" or watched else torch.get_num_threads()


def in_parallel(
    run: Callable[[PartT], ResultT], parts: Iterable[PartT], workers: int
) -> Iterator[ResultT]:
    """Runs parts on so many threads, without gradients; results come in order."""
    inference = torch.is_inference_mode_enabled()

    def one(part: PartT) -> ResultT:
        with torch.inference_mode(inference), torch.no_grad():
            return run(part)

    return _pool(workers).map(one, parts)


def _pool(workers: int) -> ThreadPoolExecutor:
    with _lock:
        if workers not in _pools:
            _pools[workers] = _started(workers)
        return _pools[workers]


def _started(workers: int) -> ThreadPoolExecutor:
    """Threads that have all begun, so that torch's number of threads can be put back."""
    before = torch.get_num_threads()
    together = threading.Barrier(workers, timeout=60)  # if one cannot be started, none waits

    def begin() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch reads the number once a thread: now, while it is 1
        together.wait()

    pool = ThreadPoolExecutor(workers, "bayesify", begin)
    try:
        list(pool.map(lambda _: None, range(workers)))
    finally:
        torch.set_num_threads(before)
    return pool


def _forget() -> None:
    """Threads do not live on in a forked process."""
    global _lock  # noqa: PLW0603  (it may have been held by one of them)
    _pools.clear()
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
