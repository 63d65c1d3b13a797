"""``pipetrain launch``: a script on workers, that end with it whichever way it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import h5py
import namespaces
import numpy as np
import pytest
import slurm_nodes
import ssh_hosts

from pipetrain.cluster.local_workers import divided, divided_gpus
from pipetrain.cluster.ssh_workers import free_ports

ROOT = Path(__file__).parents[2]
SCRIPT, DATA = ROOT / "tests/launched.py", ROOT / "tests/launched_data.py"
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


def told_within_s():
    """What is wrong is told within ten seconds, where each process has a core; within more where they wait for one."""
    return 10.0 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


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


def launching(*arguments, within=(), **settings):
    command = [*within, sys.executable, "-m", "pipetrain", "launch", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **settings)


def launched(*arguments, timeout_s=100, **settings):
    process = launching(*arguments, **settings)
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
    assert (status, text) == (0, "done\n")  # and nothing of what TensorFlow says where no GPU is
    ended(marked, 3.0)
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
def test_the_guide_s_example_reads_what_workers_have(marked, tmp_path):
    process = launching("--local", 2, ROOT / "examples/worker_files.py", cwd=tmp_path)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 0 and float(re.findall(r"\bval_accuracy: ([0-9.]+)", text)[-1]) > 0.75, text


@pytest.mark.wide
@pytest.mark.parametrize(("what", "status"), [("fail", 1), ("kill", 137)])
def test_the_exit_status_is_the_script_s(what, status, marked, tmp_path):
    found, text = launched("--local", 1, SCRIPT, tmp_path / "it", what)
    assert found == status
    assert ("a mistake in the script" in text) == (what == "fail")
    ended(marked, 3.0)


@pytest.mark.wide
def test_a_script_that_a_scheduler_s_launch_runs_may_launch_others(marked, tmp_path, monkeypatch):
    (tmp_path / "inner.py").write_text("print('inner')\n")
    line = "[sys.executable, '-m', 'pipetrain', 'launch', '--local', '1', 'inner.py']"
    (tmp_path / "outer.py").write_text(f"import subprocess, sys\nsubprocess.run({line}, check=True)\n")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    at = ["--hosts", "localhost", "--port", *free_ports(1)]
    status, text = launched(*at, "outer.py", cwd=tmp_path)
    assert status == 0 and text.splitlines()[-1] == "inner"


@pytest.mark.wide
def test_a_module_is_a_script_too(marked, tmp_path):
    (tmp_path / "mine.py").write_text("import sys, pipetrain\nprint(__name__, sys.argv[1:])\n")
    process = launching("--local", 1, "-m", "mine", "--x", "1", cwd=tmp_path)
    assert process.communicate(timeout=60)[0].splitlines()[-1] == "__main__ ['--x', '1']"


SHADOWED = ("random", "tempfile", "socket", "logging", "keras", "tensorflow", "difflib", "argparse")


def shadow(folder):
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} of the current folder')\n")


@pytest.mark.wide
@pytest.mark.parametrize("arguments", [["shown.py", "--x", "1"], ["-m", "shown", "--x"]], ids=["file", "module"])
def test_a_script_finds_what_python_would_and_what_lies_beside_it_shadows_nothing_else(marked, arguments, tmp_path):
    shadow(tmp_path)
    shown = "import sys, mine\nprint([__name__, __file__, sys.argv, sys.path, mine.__file__])\n"
    (tmp_path / "shown.py").write_text(shown)
    (tmp_path / "mine.py").write_text("")
    alone = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
    status, text = launched("--local", 1, *arguments, cwd=tmp_path)
    assert (status, text) == (0, alone.stdout)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["nosuch", "nosuch.module"])
def test_a_module_that_is_not_there_is_told(marked, name, tmp_path):
    status, text = launched("--local", 1, "-m", name, cwd=tmp_path)
    assert status == 2 and f"There is no such module. Received: -m {name}. Try a module of {tmp_path}" in text


ERRORS = {
    "raised": "def f():\n    raise KeyError('mine')\nf()\n",
    "syntax": "print('never')\nx = = 1\n",
    "from another": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('mine') from error\n",
    "text": "import sys\nsys.exit('why it ends')\n",
}


@pytest.mark.wide
@pytest.mark.parametrize("source", ERRORS.values(), ids=ERRORS)
def test_an_error_is_shown_as_python_shows_it(marked, source, tmp_path):
    (tmp_path / "script.py").write_text(source)
    alone = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert launched("--local", 1, "script.py", cwd=tmp_path) == (alone.returncode, alone.stderr)


@pytest.mark.wide
def test_a_script_s_own_status_of_75_is_no_lost_worker(marked, tmp_path):
    (tmp_path / "script.py").write_text("print('once', flush=True)\nraise SystemExit(75)\n")
    assert launched("--local", 1, "--elastic", "--wait", 5, tmp_path / "script.py") == (75, "once\n")


STARTS = """import signal, subprocess, sys, time
what = sys.argv[1]
if what == "heeds":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("heard"))
subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 600 & wait"])
print("waits", flush=True)
time.sleep({"fails": 0, "ends": 0}.get(what, 600))
if what == "fails":
    raise RuntimeError
"""


@pytest.mark.wide
@pytest.mark.parametrize("what", ["ends", "fails", "heeds", "is killed"])
def test_what_a_script_has_started_ends_with_it(marked, what, tmp_path):
    (tmp_path / "script.py").write_text(STARTS)
    process = launching("--local", 1, tmp_path / "script.py", what)
    while "waits" not in process.stdout.readline():
        assert process.poll() is None
    if what in ("heeds", "is killed"):
        process.kill()
    process.communicate(timeout=60)
    assert process.returncode == {"ends": 0, "fails": 1}.get(what, -signal.SIGKILL)
    ended(marked)


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
    @pytest.fixture(autouse=True)
    def nothing_left(self, hosts):
        with hosts.kept():
            yield

    def test_another_user_of_any_of_the_hosts_reaches_all_workers(self, hosts, asks, marked, tmp_path):
        """As SECURITY.md says."""
        process = hosts.launch("host1,host2", tmp_path / "shows.py")
        _, last = addresses(process)
        for n in (0, 1, 2):
            assert f"read: {SECRET}" in asks(last, hosts.on(n))
        process.terminate()
        process.communicate(timeout=20)

    def test_three_hosts_train_the_same_weights(self, hosts, marked, wanted, tmp_path):
        process = hosts.launch("host1,host2,host3", SCRIPT, tmp_path / "it", "three")
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 0 and "done" in text.splitlines()
        assert_trained(tmp_path / "it", wanted)

    @pytest.mark.parametrize("package", ["tensorflow", "pipetrain"])
    def test_a_host_with_another_version_is_named(self, hosts, package, marked, tmp_path):
        for version in ("1.2.3", "1.2.4"):
            about = tmp_path / version / f"{package}-{version}.dist-info"
            about.mkdir(parents=True)
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        folders = {"path": [tmp_path / "1.2.3"], "path_there": [tmp_path / "1.2.4"]}
        before_s = time.monotonic()
        process = hosts.launch("host1,host2", SCRIPT, tmp_path / "it", **folders)
        text, _ = process.communicate(timeout=30)
        took_s = time.monotonic() - before_s
        print(f"told after {took_s:.1f} s")
        assert process.returncode == 2 and re.search("The worker on host[12] does not start", text)
        assert took_s < told_within_s()
        assert f"This host has another {package}. Received: {package}==1.2.4, where 1.2.3 is used" in text

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
        assert process.returncode == 0 and "done" in text.splitlines()
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
        took_s = time.monotonic() - before_s
        print(f"told after {took_s:.1f} s")
        assert took_s < told_within_s()

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
        assert process.returncode == 0 and "done" in text.splitlines()
        assert text.count("trains") == 1 and "Lost host2" in text and "running the script again" in text
        ended(marked)
        assert_trained(tmp_path / "it", wanted)

    @pytest.mark.parametrize("scheme", ["all-reduce", "parameter-server", "1f1b"])
    def test_workers_read_their_own_data_over_tunnels_and_again_when_one_was_lost(
        self, scheme, hosts, marked, tmp_path
    ):
        """With the same drains: at each, what layers have assigned on the workers is averaged."""
        line = [DATA, tmp_path / "whole", scheme, "resume"]
        text, _ = (process := hosts.launch("host1,host2", *line)).communicate(timeout=100)
        assert process.returncode == 0 and "done" in text.splitlines(), text
        line = ["--wait", 60, DATA, tmp_path / "it", scheme, "resume"]
        process = training(hosts.launch("host1,host2", *line), tmp_path)
        hosts.kill(2, b"worker")
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 0 and "done" in text.splitlines(), text
        assert "Lost host2" in text and "running the script again" in text
        ended(marked)
        found, whole = weights(tmp_path / "it"), weights(tmp_path / "whole")
        assert len(found) == len(whole) > 5
        assert all(np.array_equal(*each) for each in zip(found, whole))

    def test_a_run_whose_workers_read_data_goes_on_without_one_of_them(self, hosts, marked, tmp_path):
        line = ["--elastic", DATA, tmp_path / "it", "all-reduce", "resume"]
        process = training(hosts.launch("host1,host2", *line), tmp_path)
        hosts.kill(2, b"worker")
        text, _ = process.communicate(timeout=100)
        assert process.returncode == 0 and "done" in text.splitlines(), text
        assert "running the script again" in text
        ended(marked)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    with slurm_nodes.SlurmNodes(tmp_path_factory.mktemp("slurm")) as nodes:
        yield nodes


@pytest.mark.skipif(bool(slurm_nodes.MISSING), reason=f"needs {', '.join(slurm_nodes.MISSING)}")
@pytest.mark.wide
class TestSlurm:
    @pytest.fixture(autouse=True)
    def nothing_left(self, nodes):
        with nodes.kept():
            yield

    def sruns(self, nodes, *arguments, options=()):
        command = [sys.executable, "-m", "pipetrain", "launch", *map(str, arguments)]
        return subprocess.Popen(
            nodes.on(0, "srun", "-N2", "-c2", *options, *command),
            env={**nodes.environment, MARK: os.environ[MARK], "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def srun(self, nodes, *arguments):
        text, _ = (process := self.sruns(nodes, *arguments)).communicate(timeout=100)
        return process.returncode, text

    @pytest.mark.parametrize("options", [[], ["--kill-on-bad-exit=1"]], ids=["", "kill on bad exit"])
    def test_a_task_that_is_killed_ends_the_run_and_the_next_step_goes_on(self, options, nodes, marked, tmp_path):
        process = training(self.sruns(nodes, "--plain", SCRIPT, tmp_path / "it", "resume", options=options), tmp_path)
        nodes.kill(2, b"worker")
        text, _ = process.communicate(timeout=100)
        assert process.returncode != 0 and "srun: error: node2: task 1: " in text
        if not options:
            assert "WorkerLost: Lost a worker: node2:" in text
        ended(marked)
        assert self.srun(nodes, "--plain", SCRIPT, tmp_path / "it", "resume")[0] == 0
        assert self.srun(nodes, "--plain", SCRIPT, tmp_path / "other", "resume")[0] == 0
        for mine, other in zip(weights(tmp_path / "it"), weights(tmp_path / "other"), strict=True):
            assert (mine == other).all()

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
@pytest.mark.parametrize("hosts", ["localhost,localhost", "[::1],::1"])
def test_processes_that_know_their_number_alone_find_each_other(marked, hosts, wanted, tmp_path, monkeypatch):
    """As pods of an indexed job of Kubernetes; these have one host."""
    port, *_ = free_ports(1)
    processes = []
    for n in (1, 0):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(n))
        processes.append(launching("--hosts", hosts, "--port", port, SCRIPT, tmp_path / "it"))
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
def test_a_worker_of_another_job_is_refused_and_that_job_goes_on(marked, wanted, tmp_path, monkeypatch):
    first, shared, *others = (f"localhost:{port}" for port in free_ports(4))
    processes = []
    for n in (1, 0):
        monkeypatch.setenv("JOB_COMPLETION_INDEX", str(n))
        processes.append(launching("--hosts", f"{first},{shared}", SCRIPT, tmp_path / "it", "pause"))
    while "trains epoch 1" not in processes[1].stdout.readline():
        assert processes[1].poll() is None
    # The third worker is the second job's own: it is let go, too.
    mine = ["--hosts", ",".join([others[0], shared, others[1]]), "--job", "mine", SCRIPT, tmp_path / "no"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
    third = launching(*mine)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    status, text = launched(*mine)
    assert status == 2 and f"Received: {shared} of job {first}; this is job mine." in text
    third.communicate(timeout=20)
    (tmp_path / "it.go").touch()
    assert third.returncode == 0
    said = [process.communicate(timeout=100)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0] and "done" in said[1].splitlines()
    ended(marked)
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
@pytest.mark.parametrize("again", [[], ["--wait", 60], ["--job", "mine"]])
def test_a_worker_that_an_earlier_launch_has_left_is_taken_only_if_it_is_to_go_on(
    again, marked, wanted, tmp_path, monkeypatch
):
    """The first process is killed, as with its host, and started again; the other one's worker has not noticed yet."""
    line = ["--hosts", ",".join(f"localhost:{port}" for port in free_ports(2)), *again, SCRIPT, tmp_path / "it"]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    second = launching(*line, "resume")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    first = training(launching(*line, "resume"), tmp_path)
    first.kill()
    first.communicate(timeout=30)
    status, text = launched(*line, "resume")
    if not again:
        assert status == 2 and "left over from an earlier launch" in text
        assert second.wait(20) == 0  # its worker was asked to end
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
        second = launching(*line, "resume")
        monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
        status, text = launched(*line, "resume")
    assert status == 0 and text.splitlines()[-1] == "done", text
    second.communicate(timeout=30)
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
@pytest.mark.skipif(bool(ssh_hosts.MISSING), reason="needs root and iproute2")
def test_pods_of_an_indexed_job_find_each_other_by_the_names_of_a_service(marked, wanted, tmp_path, monkeypatch):
    """Which are published when the pods have started: their own is not there at first, either."""
    with namespaces.Namespaces(2, "10.81.0") as pods:
        names = [f"train-{n}.train" for n in range(2)]
        known = "".join(f"{address} {name}\n" for address, name in zip(pods.addresses, names))
        (tmp_path / "hosts").write_text("127.0.0.1 localhost\n")
        with pods.kept():
            processes = []
            for n in (1, 0):
                monkeypatch.setenv("JOB_COMPLETION_INDEX", str(n))
                line = [sys.executable, "-m", "pipetrain", "launch", "--plain", "--hosts", "train-[0-1].train"]
                command = pods.named(n, f"train-{n}", tmp_path / "hosts", *line, SCRIPT, tmp_path / "it")
                processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            time.sleep(5.0)
            with (tmp_path / "hosts").open("a") as file:
                file.write(known)
            said = [process.communicate(timeout=100)[0] for process in processes]
            assert [process.returncode for process in processes] == [0, 0] and "done" in said[1].splitlines()
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
def test_a_port_in_use_is_told(marked, tmp_path, monkeypatch):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, text = launched("--hosts", "localhost", "--port", port, SCRIPT, tmp_path / "it", timeout_s=30)
    assert status == 2 and f"Received: localhost:{port}. Try another port" in text


SECRET = "what only the worker's user may read"
OWN_NETWORK = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]


@pytest.fixture
def asks(tmp_path):
    """A script that prints the workers' addresses and waits, and what another user gets from one of them."""
    (tmp_path / "shows.py").write_text("import os, time\nprint(os.environ['TF_CONFIG'], flush=True)\ntime.sleep(600)\n")
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "secret").chmod(0o600)

    def another_user(address, within=()):
        command = [*within, sys.executable, str(ROOT / "tests/another_user.py"), "65534", address, tmp_path / "secret"]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100).stdout

    yield another_user


def addresses(process):
    while "cluster" not in (line := process.stdout.readline()):
        assert process.poll() is None
    return json.loads(line)["cluster"]["worker"]


TLS = {**namespaces.NEEDED, **{name: shutil.which(name) for name in ("stunnel", "openssl", "nsenter")}}


@pytest.mark.wide
@pytest.mark.skipif(not all(TLS.values()), reason=f"needs {', '.join(TLS)}")
def test_hosts_train_behind_mutual_tls(marked, wanted, tmp_path, monkeypatch):
    """The example: hosts a and b have the certificate, a third one does not."""
    names = ["-keyout", tmp_path / "job.key", "-out", tmp_path / "job.crt"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:3072", "-nodes", "-days", "30", "-subj", "/CN=train", *names]
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "job.pem").write_text((tmp_path / "job.key").read_text() + (tmp_path / "job.crt").read_text())
    monkeypatch.setenv("PYTHON", sys.executable)
    with namespaces.Namespaces(3, "10.82.0") as hosts:
        known = "".join(f"{address} {name}\n" for address, name in zip(hosts.addresses, "abc"))
        (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{known}")

        def run(*arguments):
            line = ["bash", ROOT / "examples/stunnel.sh"]
            commands = [hosts.named(n, "ab"[n], tmp_path / "hosts", *line, n, "a b", *arguments) for n in (1, 0)]
            return [
                subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path)
                for each in commands
            ]

        def asked(*certificate):
            """What a third host gets of the second one's ports, and of its worker's, through TLS."""
            command = hosts.on(2, sys.executable, ROOT / "tests/tls_client.py", hosts.addresses[1], *certificate)
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.split()

        with hosts.kept():
            processes = run(SCRIPT, tmp_path / "it", "wait")
            while "waits" not in processes[1].stdout.readline():
                assert processes[1].poll() is None
            assert asked() == ["4001", "refused"]
            assert asked(tmp_path / "job.pem") == ["4001", "answered"]
            for process in processes:
                subprocess.run(["pkill", "-P", str(process.pid)], check=True)
                process.communicate(timeout=30)
            processes = run(SCRIPT, tmp_path / "it")
            said = [process.communicate(timeout=100)[0] for process in processes]
            assert [process.returncode for process in processes] == [0, 0] and "done" in said[1].splitlines()
    assert_trained(tmp_path / "it", wanted)


@pytest.mark.wide
@pytest.mark.skipif(bool(ssh_hosts.MISSING), reason="needs root and iproute2")
@pytest.mark.parametrize("own_network", [False, True])
def test_another_user_reaches_workers_that_have_no_network_of_their_own(own_network, asks, marked, tmp_path):
    """As SECURITY.md says."""
    process = launching("--local", 2, tmp_path / "shows.py", within=OWN_NETWORK if own_network else [])
    for address in addresses(process):
        said = asks(address)
        assert said.startswith("may not read it itself\n")
        assert ("connection refused" if own_network else f"read: {SECRET}") in said
    process.terminate()
    process.communicate(timeout=20)


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


MPIRUN = {**namespaces.NEEDED, "mpirun": shutil.which("mpirun")}


@pytest.mark.skipif(not all(MPIRUN.values()), reason=f"needs {', '.join(MPIRUN)}")
@pytest.mark.wide
def test_open_mpi_starts_a_worker_on_each_host(tmp_path):
    """Open MPI reaches hosts by an agent, here one that enters a network namespace in place of OpenSSH."""
    script = tmp_path / "train.py"
    script.write_text(
        "import pipetrain, keras, numpy as np\n"
        "model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        "pm = pipetrain.PipelineModel(model, scheme=pipetrain.AllReduce(order='none'))\n"
        "pm.compile('sgd', 'mse')\n"
        "pm.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)\n"
        "print('trained on', *sorted({name.split('/device')[0] for name in pm.stages_on}))\n"
    )
    with namespaces.Namespaces(2, "10.82.0") as hosts, hosts.kept():
        places = dict(zip(hosts.addresses, hosts.spaces))
        cases = "; ".join(f"{address}) space={space}" + " ;" for address, space in places.items())
        agent = tmp_path / "agent.sh"
        agent.write_text(
            f'#!/bin/sh\nhost=$1; shift\ncase "$host" in {cases} esac\nexec ip netns exec $space sh -c "$*"\n'
        )
        agent.chmod(0o755)
        listed = ",".join(hosts.addresses)
        settings = {"plm_rsh_agent": agent, "plm_rsh_no_tree_spawn": 1, "btl": "tcp,self", "oob_tcp_if_include": "eth0"}
        command = ["mpirun", "--allow-run-as-root", "-n", "2", "-host", listed, "-x", "PYTHONPATH"]
        command += [each for name, value in settings.items() for each in ("--mca", name, value)]
        command += [sys.executable, "-m", "pipetrain", "launch", "--plain", "--hosts", listed, script]
        done = subprocess.run(
            hosts.on(0, *command), capture_output=True, text=True, timeout=200, env=namespaces.ENVIRONMENT
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "trained on /job:worker/replica:0/task:0 /job:worker/replica:0/task:1" in done.stdout
    assert "the worker ends" in done.stdout


@pytest.mark.parametrize(
    ("cores", "workers", "wanted"),
    [
        ([4, 5], 2, [[4], [5]]),
        ([4, 5, 6], 2, [[4], [5, 6]]),
        ([4, 5], 3, [[4], [4], [5]]),
        ([4, 5], 4, [[4], [4], [5], [5]]),
        ([4, 5], 6, [[4], [4], [4], [5], [5], [5]]),
    ],
)
def test_local_workers_divide_the_cores(cores, workers, wanted):
    """No core has more than one worker more than another."""
    assert divided(cores, workers) == wanted
