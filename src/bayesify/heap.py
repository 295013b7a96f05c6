"""Memory that is freed and taken again, by every step of a long work and by every prediction."""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MOST = 32 << 20  # to which glibc raises the second by itself, and the first to twice that
KEPT = 1 << 30
CHOSEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def settle() -> Any:
    """Raises glibc's thresholds, once, to what it raises them to by itself in the long run.

    Until then a result of some megabytes is taken from Linux anew each time, which zeroes its
    pages: up to a fifth of a prediction. Other allocators, and thresholds that somebody chose, are
    left alone: then None is returned, and the C library otherwise.
    """
    libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
    if not hasattr(libc, "mallopt") or any(name in os.environ for name in CHOSEN):
        return None
    libc.mallopt(M_MMAP_THRESHOLD, MOST)
    libc.mallopt(M_TRIM_THRESHOLD, 2 * MOST)
    return libc


@contextlib.contextmanager
def kept_heap() -> Iterator[None]:
    """Keeps what is freed in the process, instead of giving it back at every step.

    Linux zeroes each page that a process takes anew, which is a tenth of a training step and more
    where every example has weights of its own. Afterwards what is free goes back.
    """
    libc = settle()
    if libc is None:
        yield
        return
    libc.mallopt(M_TRIM_THRESHOLD, KEPT)
    try:
        yield
    finally:
        libc.mallopt(M_TRIM_THRESHOLD, 2 * MOST)
        libc.malloc_trim(0)
