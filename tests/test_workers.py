import multiprocessing
import threading
import time

import pytest
import torch

from bayesify.workers import count, in_parallel
from conftest import Counting

pytestmark = pytest.mark.usefixtures("two_threads")


def threads(_: object) -> int:
    torch.ones(1000).sum()
    return torch.get_num_threads()


def test_results_come_in_order() -> None:
    def late(seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    assert list(in_parallel(late, [0.05, 0.0, 0.02, 0.0], 2)) == [0.05, 0.0, 0.02, 0.0]


def test_two_run_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)
    assert sorted(in_parallel(lambda _: together.wait(), range(2), 2)) == [0, 1]


def test_each_runs_on_one_core_and_nobody_else_does() -> None:
    assert list(in_parallel(threads, range(8), 3)) == [1] * 8
    assert torch.get_num_threads() == 2
    found: list[int] = []
    other = threading.Thread(target=lambda: found.append(threads(None)))
    other.start()
    other.join()
    assert found == [2]
    assert list(in_parallel(threads, range(8), 3)) == [1] * 8


@pytest.mark.parametrize("inference", [False, True])
def test_the_caller_s_mode_holds(inference: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with torch.inference_mode(inference), torch.no_grad():
        (made,) = in_parallel(lambda _: 2 * x, [0], 2)
    assert made.is_inference() == inference
    assert not made.requires_grad


def test_errors_reach_the_caller_and_the_threads_live_on() -> None:
    def fails(part: int) -> int:
        if part == 1:
            raise RuntimeError("no")
        return part

    with pytest.raises(RuntimeError, match="no"):
        list(in_parallel(fails, range(3), 2))
    assert list(in_parallel(fails, [0, 2], 2)) == [0, 2]


def test_who_watches_operations_sees_all() -> None:
    assert count("cpu") == 2
    assert count("cuda") == 1
    with Counting():
        assert count("cpu") == 1


def in_a_child() -> None:
    torch.set_num_threads(1)  # OpenMP does not survive a fork with more
    assert list(in_parallel(threads, range(4), 2)) == [1] * 4


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_threads_of_its_own() -> None:
    assert list(in_parallel(threads, range(4), 2)) == [1] * 4
    child = multiprocessing.get_context("fork").Process(target=in_a_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0
