"""``pipetrain launch``: a script on workers, that end with it whichever way it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import h5py
import pytest
import slurm_nodes
import ssh_hosts

from pipetrain.cluster.local_workers import divided_gpus
from pipetrain.cluster.ssh_workers import free_ports

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/launched.py"
MARK = "PIPETRAIN_TEST_OF_LAUNCH"
by_ssh = pytest.mark.skipif(bool(ssh_hosts.MISSING), reason=f"needs {', '.join(ssh_hosts.MISSING)}")


@pytest.fixture
def marked(monkeypatch):
    """All processes of this test have a mark, and none of them is left in the end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield mark
    ended(mark)


def ended(mark, within_s=10.0):
    until_s = time.monotonic() + within_s
    while left := processes(mark):
        assert time.monotonic() < until_s, f"left: {left}"
        time.sleep(0.1)


def processes(mark):
    """The commands of those that have the mark, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if int(path.name) != os.getpid() and f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended
    return found


def launching(*arguments, **settings):
    command = [sys.executable, "-m", "pipetrain", "launch", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)


def launched(*arguments, timeout_s=100):
    process = launching(*arguments)
    text, _ = process.communicate(timeout=timeout_s)
    return process.returncode, text


def training(process, folder):
    """The same, when the script has written a checkpoint."""
    while "trains" not in process.stdout.readline():
        assert process.poll() is None
    until_s = time.monotonic() + 60
    while not [*folder.glob("it.checkpoints/step-*")]:
        assert process.poll() is None and time.monotonic() < until_s
        time.sleep(0.1)
    return process


def weights(path):
    found = []
    with h5py.File(f"{path}.weights.h5") as file:
        file.visititems(lambda name, item: found.append(item[()]) if isinstance(item, h5py.Dataset) else None)
    return found


def assert_trained(output, wanted):
    assert len(weights(output)) == len(weights(wanted)) == 10
    for mine, other in zip(weights(output), weights(wanted)):
        assert mine == pytest.approx(other, abs=1e-6)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What the script trains without workers."""
    output = tmp_path_factory.mktemp("wanted") / "it"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, str(SCRIPT), str(output)], check=True, env=environment, timeout=100)
    return output


def test_a_script_trains_on_local_workers(marked, wanted, tmp_path):
    status, text = launched("--local", 2, SCRIPT, tmp_path / "it")
    assert (status, text.splitlines()[-1]) == (0, "done")
    ended(marked, 3.0)
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
def test_the_guide_s_example_reads_what_workers_have(marked, tmp_path):
    process = launching("--local", 2, ROOT / "examples/worker_files.py", cwd=tmp_path)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and float(re.findall(r"\bval_accuracy: ([0-9.]+)", text)[-1]) > 0.75, text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--local", "2", "nowhere.py"], "There is no such script. Received: 'nowhere.py'"),
        ([str(SCRIPT)], "Nothing says where to train"),
        (["--hosts", "a,b", "--plain", str(SCRIPT)], "every host starts its own process"),
        (["--hosts", "a,a", str(SCRIPT)], "Each host has one worker"),
        (["--hosts", "a,,b", str(SCRIPT)], "Hosts are names with commas between"),
    ],
)
def test_what_cannot_be_launched_is_told_at_once(arguments, said, marked, capfd):
    status, text = launched(*arguments, timeout_s=20)
    assert status == 2 and said in text and "Traceback" not in text


@pytest.mark.wide
@pytest.mark.parametrize(("what", "status"), [("fail", 1), ("kill", 137)])
def test_the_exit_status_is_the_script_s(what, status, marked, tmp_path):
    found, text = launched("--local", 1, SCRIPT, tmp_path / "it", what)
    assert found == status
    assert ("a mistake in the script" in text) == (what == "fail")
    ended(marked, 3.0)


@pytest.mark.wide
def test_a_module_is_a_script_too(marked, tmp_path):
    (tmp_path / "mine.py").write_text("import sys, pipetrain\nprint(__name__, sys.argv[1:])\n")
    process = launching("--local", 1, "-m", "mine", "--x", "1", cwd=tmp_path)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "__main__ ['--x', '1']"


@pytest.mark.wide
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_a_launcher(number, marked, tmp_path):
    process = launching("--local", 2, SCRIPT, tmp_path / "it", "wait")
    while "waits" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (-9 if number == signal.SIGKILL else {signal.SIGINT: 130, signal.SIGTERM: 143}[number])
    ended(marked)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with ssh_hosts.SshHosts(4, tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


@by_ssh
@pytest.mark.wide
class TestSsh:
    def test_a_script_trains_over_tunnels_and_no_port_is_open(self, hosts, marked, wanted, tmp_path):
        process = hosts.launch("host1,host2", SCRIPT, tmp_path / "it", "wait")
        while "waits" not in process.stdout.readline():
            assert process.poll() is None
        scan = "import socket, sys\nfor port in range(1024, 65536):\n"
        scan += "    with socket.socket() as each:\n        if not each.connect_ex((sys.argv[1], port)): print(port)\n"
        for n in (0, 1, 2):
            found = subprocess.run(
                hosts.on(3, sys.executable, "-c", scan, hosts.addresses[n]), capture_output=True, text=True, check=True
            )
            assert found.stdout == "", f"open on {hosts.names[n]}"
        process.terminate()
        process.communicate(timeout=20)
        ended(marked)
        process = hosts.launch("host1,host2", SCRIPT, tmp_path / "it")
        text, _ = process.communicate(timeout=100)
        assert (process.returncode, text.splitlines()[-1]) == (0, "done")
        ended(marked)
        assert_trained(tmp_path / "it", wanted)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("host1,10.79.0.99", "OpenSSH does not reach 10.79.0.99"),
            ("host1,nosuch.invalid", "OpenSSH does not reach nosuch.invalid"),
        ],
    )
    def test_a_host_that_cannot_be_reached_is_named(self, hosts, given, said, marked, tmp_path):
        before_s = time.monotonic()
        process = hosts.launch(given, SCRIPT, tmp_path / "it")
        text, _ = process.communicate(timeout=30)
        assert process.returncode == 2 and said in text
        ended(marked)
        assert time.monotonic() - before_s < 20  # at most 10 s on an idle machine

    def test_a_server_that_opens_forwarded_ports_to_its_network_is_refused(self, marked, tmp_path):
        with ssh_hosts.SshHosts(3, tmp_path, GatewayPorts="yes") as open_hosts:
            process = open_hosts.launch("host1,host2", SCRIPT, tmp_path / "it")
            text, _ = process.communicate(timeout=60)
            assert process.returncode == 2 and "opens forwarded ports to its network" in text
            ended(marked)

    def test_a_host_that_is_lost_ends_the_script_by_name(self, hosts, marked, tmp_path):
        process = training(hosts.launch("host1,host2", SCRIPT, tmp_path / "it", "resume"), tmp_path)
        hosts.kill(2, b"worker")
        text, _ = process.communicate(timeout=60)
        assert process.returncode == 75 and "WorkerLost" in text
        ended(marked)

    @pytest.mark.parametrize("again", [["--wait", "60"], ["--elastic"]])
    def test_the_script_runs_again_and_goes_on_from_its_checkpoint(self, again, hosts, marked, wanted, tmp_path):
        process = training(hosts.launch("host1,host2", *again, SCRIPT, tmp_path / "it", "resume"), tmp_path)
        hosts.kill(2, b"worker")
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 0 and text.splitlines()[-1] == "done"
        assert text.count("trains") == 1 and "Lost host2" in text and "running the script again" in text
        ended(marked)
        assert_trained(tmp_path / "it", wanted)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with slurm_nodes.SlurmNodes(tmp_path_factory.mktemp("slurm")) as nodes:
        yield nodes


@pytest.mark.skipif(bool(slurm_nodes.MISSING), reason=f"needs {', '.join(slurm_nodes.MISSING)}")
@pytest.mark.wide
class TestSlurm:
    def srun(self, nodes, *arguments):
        command = [sys.executable, "-m", "pipetrain", "launch", *map(str, arguments)]
        done = subprocess.run(
            nodes.on(0, "srun", "-N2", "-c2", *command),
            env={**nodes.environment, MARK: os.environ[MARK], "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
        )
        return done.returncode, done.stdout

    def test_a_script_trains_on_all_nodes(self, nodes, marked, wanted, tmp_path):
        status, text = self.srun(nodes, "--plain", SCRIPT, tmp_path / "it")
        assert status == 0 and "done" in text.splitlines() and "Worker at node2:" in text
        ended(marked)
        assert_trained(tmp_path / "it", wanted)

    @pytest.mark.parametrize(("what", "status"), [("fail", 1), ("kill", 137)])
    def test_the_exit_status_is_the_script_s_and_all_tasks_end(self, what, status, nodes, marked, tmp_path):
        assert self.srun(nodes, "--plain", SCRIPT, tmp_path / "it", what)[0] == status
        ended(marked)

    def test_it_is_asked_whether_the_network_is_trusted(self, nodes, marked, tmp_path):
        status, text = self.srun(nodes, SCRIPT, tmp_path / "it")
        assert status == 2 and "Try --plain if the network is trusted" in text


@pytest.mark.wide
def test_processes_that_know_their_number_alone_find_each_other(marked, wanted, tmp_path, monkeypatch):
    """As pods of an indexed job of Kubernetes; these have one host."""
    port, *_ = free_ports(1)
    processes = []
    for n in (1, 0):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(n))
        processes.append(launching("--hosts", "localhost,localhost", "--port", port, SCRIPT, tmp_path / "it"))
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and "done" in said[1].splitlines()
    ended(marked)
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.parametrize(
    ("gpus", "workers", "visible", "wanted"),
    [
        (0, 2, None, [None, None]),
        (4, 2, None, ["0,1", "2,3"]),
        (3, 2, None, ["0", "1,2"]),
        (2, 4, None, ["0", "0", "1", "1"]),
        (2, 2, "5,7,9", ["5", "7"]),
    ],
)
def test_local_workers_divide_the_gpus(gpus, workers, visible, wanted):
    assert divided_gpus(gpus, workers, visible) == wanted


@pytest.mark.wide
def test_a_second_launch_at_the_same_ports_touches_nothing_of_the_first(marked, tmp_path, monkeypatch):
    port, *_ = free_ports(1)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    at = ["--hosts", "localhost", "--port", port, SCRIPT, tmp_path / "it"]
    first = launching(*at, "wait")
    while "waits" not in first.stdout.readline():
        assert first.poll() is None
    status, text = launched(*at)
    assert status == 2 and "Nothing can listen there" in text and first.poll() is None
    first.terminate()
    first.communicate(timeout=30)
    ended(marked)


@pytest.mark.wide
def test_a_hangup_that_is_ignored_stays_so(marked, tmp_path):
    process = subprocess.Popen(
        [
            "nohup",
            sys.executable,
            "-m",
            "pipetrain",
            "launch",
            "--local",
            "1",
            str(SCRIPT),
            str(tmp_path / "it"),
            "wait",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while "waits" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGHUP)
    time.sleep(2.0)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=20)
    ended(marked)
