"""Slurm with two nodes on this machine: network namespaces with a slurmd each; needs root, Slurm and munge."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import namespaces

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin"
PROGRAMS = {name: shutil.which(name, path=PATH) for name in ("slurmctld", "slurmd", "srun", "munged", "nsenter")}
MISSING = [name for name, there in {**namespaces.NEEDED, **PROGRAMS}.items() if not there]
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


class SlurmNodes(namespaces.Namespaces):
    """A context: the controller is on ``node0``, where ``srun`` is called, the nodes are ``node1`` and ``node2``."""

    def __init__(self, folder):
        super().__init__(3, "10.80.0")
        self._folder = Path(folder)

    def on(self, number, *command):
        """The command, run on a node: with its network, its name, and the names of the others."""
        return self.named(number, f"node{number}", self._folder / "hosts", *command)

    @property
    def environment(self):
        """That of Slurm's commands."""
        return {**os.environ, "SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": PATH}

    def _make(self):
        super()._make()
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
        self.start(munge, env=self.environment)
        namespaces.wait((folder / "munge" / "socket").exists, "munge")
        self.start(self.on(0, "slurmctld", "-D"), env=self.environment)
        for n in (1, 2):
            self.start(self.on(n, "slurmd", "-D", "-N", f"node{n}"), env=self.environment)
        namespaces.wait(self._is_idle, "Slurm")

    def _is_idle(self):
        asked = subprocess.run(
            self.on(0, "sinfo", "-h", "-o", "%T %D"), capture_output=True, text=True, env=self.environment
        )
        return asked.stdout.split() == ["idle", "2"]
