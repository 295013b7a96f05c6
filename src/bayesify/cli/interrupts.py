"""Ctrl-C, whenever it comes."""

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 0.02  # seconds


@contextmanager
def heeded_interrupts() -> Iterator[None]:
    """Raises an interrupt again that Python had to ignore.

    Where Ctrl-C arrives while a finaliser runs, and measuring memory runs many, Python prints that
    it ignores the exception and goes on as if nobody had asked it to stop.
    """
    usual = sys.unraisablehook

    def hook(ignored: Any) -> None:
        if issubclass(ignored.exc_type, KeyboardInterrupt):
            threading.Timer(AGAIN, _thread.interrupt_main).start()  # not here: it would be lost too
        else:
            usual(ignored)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
