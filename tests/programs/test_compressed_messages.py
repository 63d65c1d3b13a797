"""What compressed messages take at the network's interface, between emulated hosts."""

from __future__ import annotations

import json

import namespaces
import numpy as np
import pytest

from pipetrain.schemes.compression import COMPRESSIONS, CUTS, NONE

PROGRAM = str(namespaces.ROOT / "tests/compressed_messages.py")
MISSING = [name for name, there in namespaces.NEEDED.items() if not there]


def figures(workers, option, *names):
    """What a step sends and what is planned, by name."""
    with namespaces.Workers(workers, "10.81.0") as hosts:
        done = hosts.program(PROGRAM, option, ",".join(names), *hosts.workers)
    assert done.returncode == 0, f"{done.returncode} {done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


NEEDS_HOSTS = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")


@NEEDS_HOSTS
@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["1f1b", "spectrain"])
def test_as_many_bytes_cross_a_cut_as_are_planned(scheme):
    """Both ways together, within 5%."""
    names = [f"{scheme}/{name}" for name in (NONE, *(each.name for each in CUTS))]
    found = figures(2, "compression", *names)
    for name, each in found.items():
        sent, planned = np.mean(each["sent"]), each["planned"]
        told = f"{name}: {sent:.0f} bytes sent in a step, {planned} planned"
        print(told)
        assert sent == pytest.approx(planned, rel=0.05), told


@NEEDS_HOSTS
@pytest.mark.wide
@pytest.mark.timeout(600)
def test_replicas_send_as_many_bytes_as_are_planned():
    """Of all three hosts together, within 5%, and 10 KB of each host that a step's calls have of their own."""
    for name, each in figures(3, "replica_compression", "int8", "top-k").items():
        (sent,), planned = each["sent"], each["planned"]
        told = f"{name}: {sent:.0f} bytes sent in a step, {planned} planned"
        print(told)
        assert sent == pytest.approx(planned, rel=0.05, abs=30_000), told


@NEEDS_HOSTS
@pytest.mark.wide
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("workers", "option", "names"),
    [(2, "compression", (NONE, *COMPRESSIONS)), (3, "topology", ("direct", "ring", "gossip"))],
)
def test_as_many_bytes_leave_a_host_as_are_planned(workers, option, names):
    """Within 2%, and 10 KB that a step's calls have of their own."""
    for name, each in figures(workers, option, *names).items():
        sent, planned = np.median(each["sent"]), each["planned"]
        told = f"{name}: {sent:.0f} bytes sent in a step, {planned} planned"
        print(told)
        assert planned <= sent <= 1.02 * planned + 10_000, told
