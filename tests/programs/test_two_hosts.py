"""Two hosts, emulated by network namespaces with a rate-limited link between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
HOSTS = (f"pipetrain{os.getpid()}-0", f"pipetrain{os.getpid()}-1")  # another run's may be there too
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATES_MBIT = (1000, 200, 50)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def on(host: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", host, *command]


@pytest.fixture
def hosts():
    """Two namespaces, joined by a pair of virtual network cards; a worker in each."""
    made: list[str] = []
    workers: list[subprocess.Popen[str]] = []
    try:
        try:
            for host in HOSTS:
                ip("netns", "add", host)
                made.append(host)
            ip("link", "add", "pipe0", "netns", HOSTS[0], "type", "veth", "peer", "name", "pipe1", "netns", HOSTS[1])
            for n, (host, address) in enumerate(zip(HOSTS, ADDRESSES)):
                ip("-n", host, "addr", "add", f"{address}/24", "dev", f"pipe{n}")
                ip("-n", host, "link", "set", f"pipe{n}", "up")
                ip("-n", host, "link", "set", "lo", "up")
                queue = ["qdisc", "add", "dev", f"pipe{n}", "root", "handle", "1:", "htb", "default", "1"]
                subprocess.run(on(host, "tc", *queue), check=True, capture_output=True, text=True)
            limit(RATES_MBIT[0])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"Network namespaces are not permitted here: {getattr(error, 'stderr', None) or error}")
        cores = sorted(os.sched_getaffinity(0))
        for n, (host, address) in enumerate(zip(HOSTS, ADDRESSES)):
            command = [sys.executable, "-m", "pipetrain", "worker", "--address", address, "--attended"]
            command += ["--cores", str(cores[n % len(cores)])]
            workers.append(
                subprocess.Popen(
                    on(host, *command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
                )
            )
        for worker in workers:
            assert "encrypts nothing" in worker.stdout.readline()
        yield
    finally:
        for worker in workers:
            worker.communicate(timeout=20)
        for host in made:
            ip("netns", "delete", host)


def limit(rate_mbit: int) -> None:
    """Either direction of the link carries so much."""
    for n, host in enumerate(HOSTS):
        kind = ["class", "replace", "dev", f"pipe{n}", "parent", "1:", "classid", "1:1", "htb", "rate"]
        kind += [f"{rate_mbit}mbit"]
        subprocess.run(on(host, "tc", *kind), check=True, capture_output=True, text=True)


@pytest.mark.wide
@pytest.mark.timeout(400)
def test_pipelines_train_and_are_evaluated_over_hosts_that_cannot_reach_the_program(hosts):
    """Only workers can be called from other hosts."""
    command = [sys.executable, "tests/two_hosts_training.py", *(f"{address}:2222" for address in ADDRESSES)]
    done = subprocess.run(
        on(HOSTS[0], *command), capture_output=True, text=True, timeout=280, cwd=ROOT, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["scheme"] for each in found] == ["1f1b", "spectrain", "all-reduce"]
    for each in found:
        assert each["there"] == pytest.approx(each["here"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_predictions_come_true_and_a_slow_link_moves_the_cut(hosts, tmp_path):
    found = {}
    for rate_mbit in RATES_MBIT:
        limit(rate_mbit)
        command = [sys.executable, "tests/two_hosts.py", *(f"{address}:2222" for address in ADDRESSES)]
        done = subprocess.run(
            on(HOSTS[0], *command),
            capture_output=True,
            text=True,
            timeout=280,
            cwd=ROOT,
            env={**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        found[rate_mbit] = json.loads(done.stdout.splitlines()[-1])
    told = "\n".join(f"{rate} Mb/s: {each}" for rate, each in found.items())
    print(told)
    for rate_mbit, each in found.items():
        assert each["bandwidth"] == pytest.approx(rate_mbit * 1e6 / 8, rel=0.15), told
        assert each["measured"] == pytest.approx(each["predicted"], rel=0.15), told
    assert found[RATES_MBIT[0]]["cuts"] != found[RATES_MBIT[-1]]["cuts"] == ["narrow"], told
