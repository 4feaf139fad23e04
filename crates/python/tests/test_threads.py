"""Experts on several threads, in forked processes, and beside PyTorch's own threads."""

import os
import threading
import warnings
from unittest import SkipTest

try:
    import torch
except ImportError as error:
    raise SkipTest(str(error)) from error

import moeworks
from ops_cases import case, grads, ours


def test_the_same_bits_for_any_number_of_threads():
    tensors, ids = case(200, 2)
    results = []
    try:
        for threads in (1, 2, 5):
            moeworks.set_num_threads(threads)
            y = ours(tensors, ids)
            results.append([y, *grads(y, tensors, torch.ones_like(y)).values()])
    finally:
        moeworks.set_num_threads(None)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_two_python_threads_at_once():
    tensors, ids = case(200, 2)
    wanted = ours(tensors, ids).detach()
    failures = []

    def work():
        for _ in range(20):
            y = ours(tensors, ids)
            torch.mm(torch.ones(50, 50), torch.ones(50, 50))
            grads(y, tensors, torch.ones_like(y))
            if not torch.equal(y, wanted):
                failures.append("other bits")

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert not worker.is_alive()
    assert not failures


def test_the_interpreter_runs_during_a_computation():
    tensors, ids = case(4000, 4)
    counts, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counts[0] += 1

    worker = threading.Thread(target=count)
    worker.start()
    try:
        with torch.no_grad():
            before = counts[0]
            for _ in range(20):
                ours(tensors, ids)
            assert counts[0] > before
    finally:
        stop.set()
        worker.join()


def test_a_forked_process_computes_and_ends():
    tensors, ids = case(64, 2)
    with torch.no_grad():
        wanted = ours(tensors, ids)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            try:
                os._exit(0 if torch.equal(ours(tensors, ids), wanted) else 1)
            finally:
                os._exit(2)
        for _ in range(600):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            threading.Event().wait(0.1)
        else:
            os.kill(child, 9)
            raise AssertionError("the child hangs")
        assert status == 0, status
        assert torch.equal(ours(tensors, ids), wanted)


def test_results_outlive_everything_and_end_on_other_threads():
    tensors, ids = case(64, 2)
    with torch.no_grad():
        kept = [ours(tensors, ids) for _ in range(8)]
    wanted = kept[0].clone()
    worker = threading.Thread(target=lambda: kept.clear())
    last = kept[-1]
    worker.start()
    worker.join()
    moeworks.set_num_threads(3)
    try:
        ours(tensors, ids)
    finally:
        moeworks.set_num_threads(None)
    assert torch.equal(last, wanted)
