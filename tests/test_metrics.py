"""The counters: exact under threads, and the same numbers through prometheus_client."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from faces import Caller, in_thread, until_waiting

import holdfast
from holdfast import metrics


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Counters that nobody else has counted with."""
    monkeypatch.setattr(metrics, "kinds", {})


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "x.lock")


def contend(lock) -> None:
    """One acquisition that has to wait."""
    hold = in_thread(lock.acquire)
    waiter = Caller(lambda: lock.acquire().release())
    until_waiting(lock, 1)
    hold.release()
    waiter.result()


def counted(kind: str) -> dict[str, int]:
    values = metrics.snapshot()[kind]
    return {name: n for name, n in values.items() if n and name != "wait_seconds"}


def test_counts_are_exact_under_threads():
    kind = metrics.kind("test")
    threads, rounds = 8, 5000
    barrier = threading.Barrier(threads)

    def count():
        barrier.wait()
        for _ in range(rounds):
            kind.acquisitions.bump()
            kind.waited(0.5)

    for thread in [Caller(count) for _ in range(threads)]:
        thread.result()
    values = metrics.snapshot()["test"]
    assert values["acquisitions"] == values["contended"] == threads * rounds
    assert values["wait_seconds"]["buckets"][0.5] == sum(values["wait_seconds"]["buckets"].values()) == threads * rounds
    assert values["wait_seconds"]["sum"] == pytest.approx(0.5 * threads * rounds)


def test_reading_does_not_count():
    kind = metrics.kind("test")
    for n in range(5):
        assert kind.losses.value == n
        assert metrics.snapshot()["test"]["losses"] == n
        kind.losses.bump()


def test_acquisitions_are_counted_by_threads_exactly(path):
    threads, rounds = 4, 100
    lock = holdfast.Lock(path)

    def work():
        for _ in range(rounds):
            with lock:
                pass

    for thread in [Caller(work) for _ in range(threads)]:
        thread.result()
    assert metrics.snapshot()["lock"]["acquisitions"] == threads * rounds


def test_a_plain_acquire_and_release_are_counted(path):
    with holdfast.Lock(path):
        assert counted("lock") == {"acquisitions": 1}
    assert counted("lock") == {"acquisitions": 1, "cleanups": 1}
    with holdfast.Lock(path, keep=True):
        pass
    assert counted("lock") == {"acquisitions": 2, "cleanups": 1}


def test_a_loss_is_counted(path):
    with pytest.raises(holdfast.LockLost), holdfast.Lock(path):
        os.unlink(path)
    assert counted("lock") == {"acquisitions": 1, "losses": 1}


def test_a_timeout_is_counted(path):
    lock = holdfast.Lock(path)
    hold = in_thread(lock.acquire)
    with pytest.raises(holdfast.Timeout):
        lock.acquire(timeout=0.001)
    hold.release()
    assert counted("lock")["timeouts"] == 1
    assert "contended" not in counted("lock")


def test_a_wait_is_counted_and_measured(path):
    contend(holdfast.Lock(path))
    values = metrics.snapshot()["lock"]
    assert (values["acquisitions"], values["contended"]) == (2, 1)
    assert sum(values["wait_seconds"]["buckets"].values()) == 1
    assert values["wait_seconds"]["sum"] > 0


def test_a_sharer_that_is_not_the_last_skips_the_cleanup(path):
    lock = holdfast.Lock(path, shared=True)
    with lock, lock:
        pass
    assert counted("lock") == {"acquisitions": 2, "cleanups": 1, "cleanups_skipped": 1}


def test_kinds_are_counted_apart(path):
    with holdfast.Lock(path), holdfast.Semaphore(path + ".sem", 2):
        pass
    assert metrics.snapshot().keys() == {"lock", "semaphore", "file"}
    assert counted("lock") == counted("semaphore") == {"acquisitions": 1, "cleanups": 1}


@pytest.mark.parametrize(
    ("seconds", "bucket"), [(0.0, 0.0001), (0.0001, 0.0001), (0.00011, 0.00025), (60.0, 60.0), (61.0, float("inf"))]
)
def test_a_wait_goes_into_the_first_bucket_that_is_not_smaller(seconds, bucket):
    metrics.kind("test").waited(seconds)
    buckets = metrics.snapshot()["test"]["wait_seconds"]["buckets"]
    assert {bound for bound, n in buckets.items() if n} == {bucket}


# prometheus_client.


def test_a_missing_prometheus_client_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install 'holdfast\[prometheus\]'"):
        metrics.export_prometheus()


def test_prometheus_gets_the_same_numbers(path):
    prometheus = pytest.importorskip("prometheus_client", reason="needs prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = prometheus.CollectorRegistry()
    collector = metrics.export_prometheus(registry)
    contend(holdfast.Lock(path))
    with holdfast.Semaphore(path, 2):
        pass
    for seconds in (0.0002, 0.0002, 0.3, 100.0):
        metrics.kind("test").waited(seconds)

    families = {f.name: f for f in text_string_to_metric_families(prometheus.generate_latest(registry).decode())}
    for name in metrics.COUNTERS:
        family = families[f"holdfast_{name}"]
        assert family.type == "counter"
        shown = {sample.labels["kind"]: sample.value for sample in family.samples if sample.name.endswith("_total")}
        assert shown == {kind: values[name] for kind, values in metrics.snapshot().items()}

    histogram = families["holdfast_wait_seconds"]
    assert histogram.type == "histogram"
    mine = [sample for sample in histogram.samples if sample.labels["kind"] == "test"]
    buckets = {float(s.labels["le"]): s.value for s in mine if s.name.endswith("_bucket")}
    assert list(buckets) == [*metrics.WAIT_BUCKETS, float("inf")]
    assert list(buckets.values()) == sorted(buckets.values())
    assert (buckets[0.0001], buckets[0.00025], buckets[0.25], buckets[0.5]) == (0, 2, 2, 3)
    assert (buckets[60.0], buckets[float("inf")]) == (3, 4)
    [count] = [s.value for s in mine if s.name.endswith("_count")]
    [total] = [s.value for s in mine if s.name.endswith("_sum")]
    assert (count, total) == (4, pytest.approx(100.3004))

    registry.unregister(collector)
    assert prometheus.generate_latest(registry) == b""
