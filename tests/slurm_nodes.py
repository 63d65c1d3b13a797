"""Slurm with two nodes on this machine: network namespaces with a slurmd each; needs root, Slurm and munge."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
NEEDED = {
    "root": os.geteuid() == 0,
    **{name: shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "srun", "munged", "nsenter", "ip")},
}
MISSING = [name for name, there in NEEDED.items() if not there]
SETTINGS = """ClusterName=test
SlurmctldHost=node0(10.80.0.1)
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=node1 NodeAddr=10.80.0.2 CPUs=2 RealMemory=1000
NodeName=node2 NodeAddr=10.80.0.3 CPUs=2 RealMemory=1000
PartitionName=all Nodes=ALL Default=YES State=UP OverSubscribe=YES
"""


class SlurmNodes:
    """A context: the controller is on ``node0``, where ``srun`` is called, the nodes are ``node1`` and ``node2``."""

    def __init__(self, folder):
        self._folder, self._spaces = Path(folder), [f"slurm{os.getpid()}-{n}" for n in range(3)]
        self._bridge = f"bl{os.getpid()}"

    def on(self, number, *command):
        """The command, run on a node: with its network, its name, and the names of the others."""
        inner = f'mount --bind {self._folder}/hosts /etc/hosts && hostname node{number} && exec "$@"'
        space = f"--net=/var/run/netns/{self._spaces[number]}"
        return ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", inner, "sh", *map(str, command)]

    @property
    def environment(self):
        """That of Slurm's commands."""
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self):
        self._ends = ExitStack()
        try:
            self._make()
        except BaseException:
            self._ends.close()
            raise
        return self

    def __exit__(self, *_):
        self._ends.close()

    def _make(self):
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        self._ends.callback(_run, "ip", "link", "delete", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")
        for n, space in enumerate(self._spaces):
            _run("ip", "netns", "add", space)
            self._ends.callback(_run, "ip", "netns", "delete", space)
            port = f"{self._bridge}p{n}"
            _run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _run("ip", "link", "set", port, "master", self._bridge, "up")
            _run("ip", "-n", space, "addr", "add", f"10.80.0.{n + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run("ip", "-n", space, "link", "set", device, "up")
        folder = self._folder
        names = "".join(f"10.80.0.{n + 1} node{n}\n" for n in range(3))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder))
        for name in ("state", "spool-node1", "spool-node2", "munge"):
            (folder / name).mkdir()
        (folder / "munge" / "key").write_bytes(os.urandom(128))
        (folder / "munge" / "key").chmod(0o400)
        (folder / "munge").chmod(0o711)
        munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge/key"]
        munge += [
            f"--{name}={folder}/munge/{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._start(munge)
        self._wait((folder / "munge" / "socket").exists)
        self._start(self.on(0, "slurmctld", "-D"))
        for n in (1, 2):
            self._start(self.on(n, "slurmd", "-D", "-N", f"node{n}"))
        self._wait(self._is_idle)

    def _is_idle(self):
        asked = subprocess.run(
            self.on(0, "sinfo", "-h", "-o", "%T %D"), capture_output=True, text=True, env=self.environment
        )
        return asked.stdout.split() == ["idle", "2"]

    def _start(self, command):
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=self.environment)
        self._ends.callback(process.wait)
        self._ends.callback(process.terminate)

    def _wait(self, is_there):
        until_s = time.monotonic() + 30
        while not is_there():
            assert time.monotonic() < until_s, "Slurm does not start"
            time.sleep(0.2)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)
