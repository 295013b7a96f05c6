"""Memory that steps free and take again: thresholds are raised, and put back whatever happens."""

import ctypes

import pytest

from bayesify.heap import CHOSEN, KEPT, M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, MOST, kept_heap, settle


class Libc:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def mallopt(self, *asked: int) -> None:
        self.calls.append(asked)

    def malloc_trim(self, pad: int) -> None:
        self.calls.append(("trim", pad))


@pytest.fixture
def libc(monkeypatch):
    found = Libc()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: found)
    for name in CHOSEN:
        monkeypatch.delenv(name, raising=False)
    settle.cache_clear()
    yield found
    settle.cache_clear()


def test_settled_once(libc):
    for _ in range(2):
        assert settle() is libc
    assert libc.calls == [(M_MMAP_THRESHOLD, MOST), (M_TRIM_THRESHOLD, 2 * MOST)]


def test_kept_while_it_runs_and_given_back_after_an_error(libc):
    kept = [(M_MMAP_THRESHOLD, MOST), (M_TRIM_THRESHOLD, 2 * MOST), (M_TRIM_THRESHOLD, KEPT)]

    def work() -> None:
        with kept_heap():
            assert libc.calls == kept
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert libc.calls == [*kept, (M_TRIM_THRESHOLD, 2 * MOST), ("trim", 0)]


@pytest.mark.parametrize("name", CHOSEN)
def test_thresholds_that_somebody_chose_are_left_alone(libc, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    with kept_heap():
        pass
    assert libc.calls == []


def test_other_c_libraries_are_left_alone(libc, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    with kept_heap():
        pass
