"""Clusters: hosts files, the command line of a worker, joining, and what measured links mean to the planner."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipetrain.cli.main import main
from pipetrain.cluster import bandwidth, connection, server
from pipetrain.cluster.bandwidth import apart, message_work
from pipetrain.cluster.connection import connect, described_by
from pipetrain.cluster.hosts import Hosts, is_loopback, split, task_of_tf_config, with_port
from pipetrain.cluster.local_workers import LocalWorkers
from pipetrain.cluster.sockets import NO_HOST
from pipetrain.compute.cores import own_machine
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.simulation.costs import Network
from pipetrain.simulation.simulator import simulate

ROOT = Path(__file__).parents[2]
TWO = {"workers": ["10.0.0.1:2222", "10.0.0.2:2222"]}


def run(script: str, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """The script in a process of its own: TensorFlow's runtime joins a cluster for as long as it lasts."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"},
    )


@pytest.fixture
def in_use():
    """The address of somebody who listens and says nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_a_hosts_file_tf_config_and_addresses_say_the_same(tmp_path, monkeypatch):
    (tmp_path / "hosts.json").write_text(json.dumps(TWO))
    told = json.dumps({"cluster": {"worker": TWO["workers"]}, "task": {"type": "worker", "index": 1}})
    expected = Hosts(("10.0.0.1:2222", "10.0.0.2:2222"))
    assert Hosts.load(tmp_path / "hosts.json") == Hosts.of_tf_config(told) == expected
    assert task_of_tf_config(told) == 1
    monkeypatch.setenv("TF_CONFIG", told)
    given = (
        None,
        TWO,
        TWO["workers"],
        str(tmp_path / "hosts.json"),
        tmp_path / "hosts.json",
        {"worker": {0: "10.0.0.1:2222", 1: "10.0.0.2:2222"}},
    )
    assert all(described_by(each) == expected for each in given)
    import tensorflow as tf

    assert described_by(tf.distribute.cluster_resolver.TFConfigClusterResolver()) == expected


@pytest.mark.parametrize(
    "content, wrong",
    [
        ('{"workers": ["a:1", ', "Expecting value"),
        ('["a:1"]', "not an object"),
        ('{"hosts": ["a:1"]}', "it has workers, not hosts"),
        ("{}", "no workers"),
        ('{"workers": []}', "workers: there are none"),
        ('{"workers": "a:1"}', "workers: 'a:1' is not a list"),
        ('{"workers": ["a:1", "b"]}', r"workers\[1\]: 'b' is not an address"),
        ('{"workers": ["a:1", 7]}', r"workers\[1\]: 7 is not an address"),
        ('{"workers": ["a:70000"]}', r"workers\[0\]"),
        ('{"workers": ["a:1", "a:1"]}', "workers: a:1 is there twice"),
    ],
)
def test_a_wrong_hosts_file_is_named_with_its_key(tmp_path, content, wrong, capsys):
    path = tmp_path / "hosts.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"Not a hosts file: .*{wrong}.*hosts.json"):
        Hosts.load(path)
    assert main(["worker", "--cluster", str(path), "--task", "0"]) == 2
    assert "hosts.json" in capsys.readouterr().err


def test_addresses_may_be_of_ipv6():
    assert split("[fd00::1]:2222") == ("fd00::1", 2222) and with_port("fd00::1", 2222) == "[fd00::1]:2222"
    assert split("worker-0.example:1") == ("worker-0.example", 1) and with_port("::1", 1) == "[::1]:1"
    for wrong in ("10.0.0.1", "::1:2222", "[::1]", "[10.0.0.1]:1", "[:::]:1", "a:0", "a:70000", "a:-1", "", " a:1"):
        with pytest.raises(ValueError, match=r"not an address such as .* or \[fd00::1\]:2222, with a port from 1"):
            split(wrong)


def test_tf_configs_tasks_go_by_their_numbers():
    """JSON has no numbers as keys, and no order of keys."""

    def told(workers, **task):
        return json.dumps({"cluster": {"worker": workers, "chief": ["10.0.0.9:1"]}, "task": task})

    workers = {"1": "10.0.0.2:2222", "0": "10.0.0.1:2222"} | {str(n): f"10.0.0.{n + 1}:2222" for n in range(2, 11)}
    assert Hosts.of_tf_config(told(workers)).workers == tuple(f"10.0.0.{n + 1}:2222" for n in range(11))
    assert task_of_tf_config(told(workers, type="worker", index="1")) == 1
    assert task_of_tf_config(told(workers, type="chief", index=0)) is None
    with pytest.raises(ValueError, match="from 0 without gaps, not 0, 2"):
        Hosts.of_tf_config(told({"0": "a:1", "2": "b:1"}))
    for index in (True, -1, "one", None, 0.5):
        with pytest.raises(ValueError, match="is not a type and an index"):
            task_of_tf_config(told(workers, type="worker", index=index))
    with pytest.raises(ValueError, match="Not a cluster in TF_CONFIG: it is not JSON"):
        Hosts.of_tf_config("{")


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        ({"count": 0}, "at least one worker.*count=0"),
        ({"count": True}, "at least one worker.*count=True"),
        ({"count": 2, "ports": [0]}, r"each with a port.*ports=\[0\]"),
        ({"count": 2, "ports": 5}, r"each with a port.*ports=5"),
        ({"count": 1, "cpu_devices": 0}, "cpu_devices=0"),
        ({"count": 1, "cpu_devices": 5000}, "from 1 to 1024 devices.*cpu_devices=5000"),
        ({"count": 1, "ports": [70000]}, r"up to 65535.*Received: ports=\[70000\]. Try 0"),
        ({"count": 2, "ports": [2222, 2222]}, "a port of its own"),
        ({"count": 1, "ports": ["in use"]}, "Address already in use"),
    ],
)
def test_local_workers_that_cannot_be_are_refused_before_any_starts(arguments, wrong, in_use, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    if arguments.get("ports") == ["in use"]:
        arguments = {**arguments, "ports": [int(in_use.split(":")[1])]}
    with pytest.raises(ValueError, match=wrong):
        LocalWorkers(**arguments)


@pytest.mark.parametrize("option", ["--port", "--cpu-devices", "--intra-threads", "--inter-threads"])
def test_a_workers_options_have_bounds(option, capsys):
    with pytest.raises(SystemExit):
        main(["worker", option, "9999999999"])
    assert f"argument {option}: '9999999999' is not a" in capsys.readouterr().err


def test_one_worker_under_two_names_is_refused():
    with pytest.raises(ValueError, match=r"are of one worker. Received: localhost:1 and 127\.0\.0\.1:1"):
        connection._check_names(Hosts(("localhost:1", "127.0.0.1:1")))
    connection._check_names(Hosts(("localhost:1", "127.0.0.1:2", "nowhere.invalid:1")))


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), None, "5", True])
def test_connect_wants_a_time(timeout_s):
    with pytest.raises(ValueError, match="timeout_s="):
        connect(["127.0.0.1:1"], timeout_s)


def test_grpc_has_no_proxy_to_workers(monkeypatch):
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server.without_proxy_to(["10.0.0.1"])
    assert os.environ[server.EXCEPTIONS[0]] == "10.0.0.1"
    monkeypatch.delenv("no_grpc_proxy")
    monkeypatch.setenv("no_proxy", "example.com, 10.0.0.1,")
    for _ in range(2):
        server.without_proxy_to(["10.0.0.1", "10.0.0.2"])
    assert os.environ[server.EXCEPTIONS[0]] == "example.com,10.0.0.1,10.0.0.2"
    monkeypatch.delenv("no_grpc_proxy")


PROGRAM = """
import json, os, sys, time
import pipetrain

if __name__ == "__main__":
    workers = pipetrain.LocalWorkers(1)
    if not (child := os.fork()):
        time.sleep(600)
        os._exit(0)
    devices = pipetrain.connect(workers.addresses, timeout_s=30)
    import tensorflow as tf
    with tf.device(devices[0]):
        for _ in range(20):
            tf.print("x" * 10000, output_stream=sys.stdout)
        float(tf.identity(1.0))  # a worker runs its operations in order: all is printed
    with open(sys.argv[1], "w") as file:
        json.dump({"worker": workers.processes[0].pid, "child": child}, file)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def workers_of_a_killed_program(tmp_path_factory):
    """What came of a program in a folder with a module of somebody else's, behind a proxy, that forked and was killed.

    Its standard output, and the process that it forked, which lives on.
    """
    home, shared = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("shared")
    (home / "program.py").write_text(PROGRAM)
    (shared / "argparse.py").write_text("raise SystemExit('imported from the current folder')")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment = {name: value for name, value in environment.items() if "proxy" not in name.lower()}
    environment |= {"http_proxy": "http://127.0.0.1:9"}  # where nobody listens
    with open(home / "output", "w+") as output:
        command = [sys.executable, str(home / "program.py"), str(home / "pids")]
        program = subprocess.Popen(command, stdout=output, cwd=shared, env=environment)
        try:
            status = program.wait(240)
        finally:
            program.kill()
            program.wait()
    pids = json.loads((home / "pids").read_text()) if (home / "pids").exists() else {}
    yield {"status": status, "output": (home / "output").read_text(), **pids}
    if "child" in pids:
        os.kill(pids["child"], signal.SIGKILL)


@pytest.mark.wide
def test_a_worker_imports_nothing_from_the_current_folder_and_no_proxy_holds_it_up(workers_of_a_killed_program):
    assert workers_of_a_killed_program["status"] == -signal.SIGKILL  # having joined


@pytest.mark.wide
def test_what_a_worker_prints_is_printed_by_the_program(workers_of_a_killed_program):
    """More than a pipe holds."""
    assert workers_of_a_killed_program["output"].count("x") == 200_000


def test_a_worker_goes_on_when_nobody_reads_what_it_says(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    said = []
    with pytest.raises(BrokenPipeError), open(writer, "w") as output:  # in closing it: nobody reads it indeed
        monkeypatch.setattr(sys, "stdout", output)
        for what in ("A controller has joined.", "The controller has ended: the worker ends."):
            server._say(what, True)
            said.append(what)
    assert len(said) == 2


@pytest.mark.wide
def test_a_worker_ends_with_its_program_whoever_else_lives_on(workers_of_a_killed_program):
    until_s = time.monotonic() + 20
    while _runs(workers_of_a_killed_program["worker"]) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not _runs(workers_of_a_killed_program["worker"])
    assert _runs(workers_of_a_killed_program["child"])


@pytest.mark.wide
def test_who_answers_but_never_joins_holds_connect_no_longer_than_told():
    """And the program ends, though TensorFlow waits."""
    script = """
import socket, threading, time
import pipetrain
from pipetrain.cluster import connection

def answer(each):
    each.recv(1000)
    each.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    while each.recv(1000):
        pass

def serve():
    while True:
        threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

server = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, daemon=True).start()
connection.JOINED_S = 2.0
try:
    pipetrain.connect([f"127.0.0.1:{server.getsockname()[1]}"], timeout_s=1.0)
except ConnectionError as error:
    print(error)
"""
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert "answer, but do not join within 2 s" in done.stdout


@pytest.mark.slow
def test_one_worker_by_two_addresses_is_refused():
    script = """
import pipetrain
with pipetrain.LocalWorkers(1) as workers:
    try:
        pipetrain.connect([workers.addresses[0], workers.addresses[0].replace("127.0.0.1", "127.0.0.2")])
    except ValueError as error:
        print(error)
"""
    done = run(script)
    assert "Two of the addresses are of one worker" in done.stdout, done.stderr


@pytest.mark.slow
def test_a_worker_with_an_ipv6_address_is_joined():
    script = """
import subprocess, sys
import pipetrain
command = [sys.executable, "-m", "pipetrain", "worker", "--address", "::1", "--port", "0", "--attended"]
with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
    said = worker.stdout.readline()
    print(said, pipetrain.connect([said.split()[2].rstrip(",")]))
    worker.stdin.close()
"""
    if not socket.has_ipv6:
        pytest.skip("There is no IPv6.")
    done = run(script)
    assert done.stdout.startswith("Worker at [::1]:") and "/job:worker" in done.stdout, done.stderr
    assert "Every user of this machine can run code" in done.stdout


def test_a_worker_that_cannot_serve_says_why(in_use, tmp_path, capsys, monkeypatch):
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(TWO))
    port = in_use.split(":")[1]
    for arguments, wrong in [
        (["--port", port], f"Address already in use. Received: 127.0.0.1:{port}"),
        (["--address", "203.0.113.7"], "Received: 203.0.113.7:2222"),  # of nobody: RFC 5737
        (["--cores", "4095", "--port", "0"], "cores=[4095]"),
        (["--cluster", str(path), "--task", "2"], "task 2 of 2"),
        (["--cluster", str(path)], "no --task"),
        (["--task", "1"], "--task 1 without --cluster"),
        (["--cluster", str(path), "--task", "0", "--port", "1"], "--address or --port"),
        (["--cluster", str(tmp_path / "none.json"), "--task", "0"], "none.json"),
    ]:
        assert main(["worker", *arguments]) == 2
        assert wrong in capsys.readouterr().err
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "chief", "index": 0}}')
    assert main(["worker"]) == 2
    assert "TF_CONFIG names no worker" in capsys.readouterr().err


def test_only_loopback_addresses_keep_others_out():
    assert all(map(is_loopback, ["127.0.0.1", "localhost", "localhost:1", "127.0.0.1:2222", "[::1]:2222", "::1"]))
    others = ["10.0.0.1", "0.0.0.0:2222", "worker-0", "127.example.com", "127.example.com:2222", "localhost.example"]
    assert not any(map(is_loopback, [*others, "[::]:2222"]))


@pytest.mark.wide
def test_workers_that_do_not_answer_are_told(in_use):
    """TensorFlow itself would wait for minutes, or end the process."""
    script = f"""
import json
import pipetrain
said = []
for addresses in (["127.0.0.1:1"], ["{in_use}"], ["nowhere.invalid:2222"]):
    try:
        pipetrain.connect(addresses, timeout_s=1.0)
    except ConnectionError as error:
        said.append(str(error))
import keras
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
try:
    pipetrain.connect(["{in_use}"])
except RuntimeError as error:
    said.append(str(error))
print(json.dumps(said))
"""
    done = run(script)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for message, part in zip(said, ["refused", "no answer", "no such host", "too late"], strict=True):
        assert part in message


class Clock:
    """Time that passes only while somebody sleeps, or waits for an answer that does not come."""

    def __init__(self):
        self.now_s = 0.0
        self.monotonic = lambda: self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize(
    ("why", "job", "tried_s"),
    [("no answer", "", 5), ("connection refused", "", 5), (NO_HOST, "", 0), (NO_HOST, "7.0", 5), ("", "", 0)],
)
def test_workers_are_asked_until_the_time_is_over(why, job, tried_s, monkeypatch):
    """A name that there is not is final, unless a scheduler has started the job, and may publish it late."""
    clock, asked_s = Clock(), []
    monkeypatch.setenv("PIPETRAIN_WORKER_JOBS", json.dumps({"10.0.0.1:2222": job} if job else {}))

    def probed(address, timeout_s):
        asked_s.append(clock.now_s)
        clock.sleep(timeout_s if why == "no answer" else 0.0)
        return why if clock.now_s < 100.0 else ""

    monkeypatch.setattr(connection, "time", clock)
    monkeypatch.setattr(connection, "probed", probed)
    if why:
        with pytest.raises(ConnectionError, match=rf"10\.0\.0\.1:2222 \({why}\), tried for {tried_s} s"):
            connection.check_answers(Hosts(("10.0.0.1:2222",)), 5.0)
    else:
        connection.check_answers(Hosts(("10.0.0.1:2222",)), 5.0)
    assert clock.now_s <= 5.0 + connection.RETRY_S
    if why == "connection refused" or job:  # it may be starting: asked again and again
        assert len(asked_s) > 20 and asked_s[-1] > 5.0 - 2 * connection.RETRY_S
    else:
        assert len(asked_s) == 1


KILLED = """
import json, os
import pipetrain

with pipetrain.LocalWorkers(2) as workers:
    pipetrain.connect(workers.addresses)
    print(json.dumps([process.pid for process in workers.processes]), flush=True)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_workers_end_with_a_controller_that_is_killed():
    done = run(KILLED)
    assert done.returncode == -signal.SIGKILL
    pids, until_s = json.loads(done.stdout.splitlines()[-1]), time.monotonic() + 20
    while any(map(_runs, pids)) and time.monotonic() < until_s:
        time.sleep(0.1)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.slow
def test_a_worker_whose_controller_has_gone_ends_or_waits():
    script = """
import subprocess, sys, time
code = 'import sys; from pipetrain.cluster import server; server.GONE_S = 8.0; from pipetrain.cli.main import main; '
code += 'main(["worker", "--port", "0", "--attended", "--on-controller-gone", sys.argv[1]])'
workers = [
    subprocess.Popen([sys.executable, "-c", code, what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for what in ("end", "wait")
]
addresses = [worker.stdout.readline().split()[2].rstrip(",") for worker in workers]
subprocess.run([sys.executable, "-c", f"import pipetrain, time; pipetrain.connect({addresses}); time.sleep(20)"])
alive = [worker.poll() is None for worker in workers]
print(workers[0].wait(30), alive, workers[1].poll(), workers[0].stdout.read())
workers[1].communicate()
"""
    done = run(script)
    assert done.stdout.startswith("0 [True, True] None"), done.stderr
    assert "no sign of life" in done.stdout


@pytest.mark.slow
def test_a_worker_with_another_tensorflow_is_refused():
    script = """
import subprocess, sys
import pipetrain
code = 'import tensorflow as tf; tf.__version__ = "1.2.3"; from pipetrain.cli.main import main; '
code += 'main(["worker", "--port", "0", "--attended"])'
with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
    address = worker.stdout.readline().split()[2].rstrip(",")
    try:
        pipetrain.connect([address])
    except ValueError as error:
        print(error)
    worker.stdin.close()
"""
    done = run(script)
    assert "1.2.3; the controller has 2." in done.stdout, done.stderr


def test_messages_within_one_process_take_no_work():
    assert message_work(["CPU:0", "CPU:1"], Cluster()) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("known", "groups"),
    [
        ({}, ((0, 1, 2, 3),)),
        ({"processors": 2}, ((0, 1), (2, 3))),
        ({"processors": 2, "cores": ((0,), (0,), (1,), (1,))}, ((0, 2), (1, 3))),
        ({"processors": 3, "cores": ((0, 1), (1, 2), (2,), (3,))}, ((0, 1, 3), (2,))),
        ({"processors": 2, "cores": ((0, 1),) * 4}, ((0, 1), (2, 3))),
    ],
)
def test_devices_of_a_group_wait_for_no_core(known, groups):
    assert apart(Cluster(**known), 4) == groups


def on_one_machine(monkeypatch, mine, *devices):
    """This process may use these cores, and workers theirs."""
    said = [{"machine": own_machine(), "host": str(n), "cores": each} for n, each in enumerate(devices)]
    monkeypatch.setattr(bandwidth, "_about", said.__getitem__)
    monkeypatch.setattr(bandwidth, "cores", lambda: mine)
    return said, [f"/job:worker/replica:0/task:{n}/device:CPU:0" for n in range(len(devices))]


@pytest.mark.parametrize(
    ("mine", "workers", "work_s"),
    [
        ([0, 1], ([0], [1]), (0.5, 0.5)),
        ([0, 1, 2], ([0], [1]), ()),  # a core has nothing to do
        ([1], ([0], [1]), (0.0, 1.0)),
        ([2], ([0], [1]), ()),
        ([0, 1], ([0, 1],), (0.5,)),  # each core does half of it, while the device computes on both
        ([0, 1], ([0, 1],) * 4, (0.25,) * 4),  # and in all, 1
    ],
)
def test_what_the_program_takes_of_workers_cores(monkeypatch, mine, workers, work_s):
    _, devices = on_one_machine(monkeypatch, mine, *workers)
    monkeypatch.setattr(bandwidth, "_call_of_all_s", lambda devices: (0.0, 1.0 / bandwidth.CALLER_WORK))
    cluster = Cluster(cores=bandwidth._own_cores(devices))
    assert bandwidth._caller_work_s(devices, cluster) == pytest.approx(work_s)


def test_one_device_computes_as_fast_as_itself():
    assert bandwidth._speeds(0, ("/job:worker/replica:0/task:7/device:CPU:0",), ((0,),)) == (1.0,)


def test_containers_of_a_machine_share_its_cores(monkeypatch):
    """Two hosts by their network, one by their cores; other machines have other cores of the same numbers."""
    said, devices = on_one_machine(monkeypatch, [0], [0], [0], [0])
    assert bandwidth._own_cores(devices) == ((0,), (0,), (0,)) and bandwidth._at_once(devices) == 1
    del said[0]["machine"], said[1]["machine"]  # as workers of before
    said[1]["host"] = "0"
    assert bandwidth._own_cores(devices)[:2] == ((0,), (0,))
    said, devices = on_one_machine(monkeypatch, [0], [0], [0], [0])
    said[2]["machine"] = "another"
    assert bandwidth._own_cores(devices) == ((0,), (0,), (1,)) and bandwidth._at_once(devices) == 2


@pytest.mark.wide
def test_a_worker_s_clock_tells_what_a_compression_takes():
    """Calls to workers take longer the more tensors they are given, here 2 ms for each."""
    script = """
import time
import pipetrain
from pipetrain.compute.profiling import timing
direct = timing.direct

def slow(concrete):
    call = direct(concrete)
    return lambda tensors: (time.sleep(0.002 * len(tensors)), call(tensors))[1]

timing.direct = slow
with pipetrain.LocalWorkers(1) as workers:
    found = timing.time_coding(pipetrain.Int8(), pipetrain.connect(workers.addresses)[0])
    print(found.encode_s[0] < 0.001, found.decode_s[0] < 0.001)
"""
    done = run(script)
    assert done.stdout.startswith("True True"), done.stderr


@pytest.mark.slow
def test_what_is_known_of_workers_processors_is_measured():
    script = """
import math
import pipetrain
from pipetrain.cluster.bandwidth import joined, with_processors
with pipetrain.LocalWorkers(2) as workers:
    devices = pipetrain.connect(workers.addresses)
    found = with_processors(joined(devices, within_functions=True), devices)
    work, speeds = found.message_work, found.speeds
    print(0 <= work.overhead_s < math.inf and 0 <= work.s_per_byte < math.inf, [0.01 < each < 100 for each in speeds],
          len(found.caller_work_s) in (0, 2))
"""
    done = run(script)
    assert done.stdout.startswith("True [True, True] True"), done.stderr


def test_a_cluster_with_measured_links():
    own, fast, slow = Link(float("inf")), Link(1e9, 1e-3), Link(1e6, 2e-3)
    cluster = Cluster((Level(slow),), between=((own, fast, slow), (fast, own, slow), (slow, slow, own)))
    assert cluster.link(0, 1) == fast and cluster.link(1, 2) == cluster.link(2, 1) == slow
    assert cluster.link(2, 7) == slow  # which was not measured
    network = Network(cluster)
    assert network.route(1, 0).bandwidth_bytes_per_s == 1e9 and network.route(2, 0).latency_s == 2e-3


def test_connect_wants_a_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(ValueError, match="There is no cluster"):
        connect()
    with pytest.raises(ValueError, match=r"cannot be read.*none\.json"):
        connect("none.json")


def test_overhead_of_actions_is_planned_and_simulated():
    profile = Profile("chain", 8, tuple(BlockProfile(name, 1.0, 2.0, 0, 0) for name in "ab"))
    cluster = Cluster((Level(Link(float("inf"))),), overhead_s=0.25)
    cut = partition(profile, 2, cluster)
    assert [stage.total_s for stage in cut.stages] == [3.5, 3.5] and cut.step_s == 3.5
    assert partition(profile, 2, cluster, training=Training("gpipe", microbatches=4)).slowest_s == 3.0 + 8 * 0.25
    assert simulate(cut, "single", cluster, minibatches=2).duration_s == 2 * 6.5
    assert simulate(cut, "single", cluster, minibatches=2, overhead_s=0.0).duration_s == 12.0


def test_what_was_measured_of_former_workers_is_forgotten(monkeypatch):
    """Workers that are started anew may be on other hosts, with other cores."""
    said, times = [{"host": "a"}, {"host": "b"}], [1, 1, 2]
    monkeypatch.setattr(bandwidth, "about", lambda task: said[0])
    monkeypatch.setattr(bandwidth, "joins", lambda: times[0])
    device = "/job:worker/replica:0/task:0/device:CPU:0"
    for host in ("a", "a", "b"):
        bandwidth._forget_former_workers()
        assert bandwidth._host(device) == host
        times.pop(0)
        said = [{"host": "b"}]
    bandwidth._about.cache_clear()
