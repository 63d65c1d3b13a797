"""Which worker a process is, by the variables of whoever has started it."""

from __future__ import annotations

import json
import re

import pytest

from pipetrain.cluster.membership import SLURM_PORTS, expanded, member_of

SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_NODELIST": "node[1-2],gpu7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "7",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b , c", ["a", "b", "c"]),
        ("node[1-3,7]", ["node1", "node2", "node3", "node7"]),
        ("n[08-10].x,m", ["n08.x", "n09.x", "n10.x", "m"]),
        ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
        ("user@a,localhost", ["user@a", "localhost"]),
        ("fd00::1,[fd00::2],[::1]:3000,a:7", ["fd00::1", "[fd00::2]", "[::1]:3000", "a:7"]),
    ],
)
def test_hosts_are_written_as_schedulers_write_them(text, names):
    assert expanded(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "one is empty"),
        ("a,,b", "one is empty"),
        ("node[a-b]", "'a-b' is no number"),
        ("node[1-", "brackets do not match in node[1-"),
        ("node1]", "brackets do not match in node1]"),
        ("node[]", "'' is no number"),
        ("a[3-1]", "3-1 counts down"),
        ("a b", "'a b' is none"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is none"),
        ("root@", "'root@' is none"),
        ("[fd00::x]", "[fd00::x] holds no IPv6 address"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text, why):
    said = re.escape(f"Hosts are names with commas between, but {why}")
    with pytest.raises(ValueError, match=rf"{said}.*Received: --hosts {re.escape(repr(text))}\. Try a,b"):
        expanded(text)


def test_a_process_of_a_step_of_slurm_knows_all_workers():
    first = SLURM_PORTS[41]
    member = member_of(SLURM)
    hosts = ["node1", "node1", "node2", "node2", "gpu7"]
    ports = [first, first + 1, first, first + 1, first]
    assert member.addresses == tuple(f"{host}:{port}" for host, port in zip(hosts, ports))
    assert (member.scheduler, member.number, member.address) == ("Slurm", 3, f"node2:{first + 1}")
    assert member.job == "41.7"
    assert member_of(SLURM, port=3000).address == "node2:3001"


def test_a_job_of_slurm_that_is_no_step_is_told_about_srun():
    with pytest.raises(ValueError, match=r"job 41 of Slurm, and none of its steps.*Try srun"):
        member_of({"SLURM_JOB_ID": "41", "SLURM_PROCID": "0"})


def test_numbers_of_mpi_and_kubernetes_need_hosts():
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "3"}
    assert member_of(mpi, ["a", "b", "a"]) == ("Open MPI", ("a:2222", "b:2222", "a:2223"), 1, "a:2222")
    assert member_of({**mpi, "PMIX_NAMESPACE": "prterun-a-9@1"}, ["a", "b", "a"]).job == "prterun-a-9@1"
    assert member_of({"JOB_COMPLETION_INDEX": "1"}, ["job-0.x", "job-1.x"], 9).address == "job-1.x:9"
    assert member_of({"PMI_RANK": "0", "PMI_SIZE": "1"}, ["a:7"]).address == "a:7"
    ipv6 = expanded("[::1],::1,[fd00::2]:7")
    assert member_of({"PMI_RANK": "0"}, ipv6).addresses == ("[::1]:2222", "[::1]:2223", "[fd00::2]:7")
    with pytest.raises(ValueError, match=r"Received: --hosts with user@a\. Try a,b or"):
        member_of({"PMI_RANK": "0"}, ["user@a"])
    with pytest.raises(ValueError, match=r"no --hosts\. Try --hosts a,b"):
        member_of(mpi)
    with pytest.raises(ValueError, match="3 processes of Open MPI, 2 --hosts"):
        member_of(mpi, ["a", "b"])
    with pytest.raises(ValueError, match="Kubernetes says number 2 of a:2222, b:2222"):
        member_of({"JOB_COMPLETION_INDEX": "2"}, ["a", "b"])


def test_tf_config_names_one_of_its_workers():
    cluster = {"cluster": {"worker": ["a:1", "b:2"]}}
    found = member_of({"TF_CONFIG": json.dumps({**cluster, "task": {"type": "worker", "index": 1}}), **SLURM})
    assert found == ("TF_CONFIG", ("a:1", "b:2"), 1, "a:1")
    assert member_of({"TF_CONFIG": json.dumps(cluster)}, ["a", "b"]) is None  # hosts that are given go first
    with pytest.raises(ValueError, match="TF_CONFIG names no worker"):
        member_of({"TF_CONFIG": json.dumps(cluster)})


def test_nothing_says_nothing():
    assert member_of({}) is None and member_of({"OMPI_COMM_WORLD_RANK": "x"}) is None
