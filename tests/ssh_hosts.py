"""Hosts emulated by network namespaces of this machine, with OpenSSH's server on each; needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
NEEDED = {"root": os.geteuid() == 0, "sshd": SSHD, "ip": shutil.which("ip")}
MISSING = [name for name, there in NEEDED.items() if not there]
PYTHON = f"env PYTHONPATH={ROOT} TF_CPP_MIN_LOG_LEVEL=2 {sys.executable}"


class SshHosts:
    """A context: namespaces ``0`` to ``count - 1``, joined by a bridge; every one but the first has an sshd.

    ``names`` are those of the hosts for OpenSSH, by the file ``config``.
    """

    def __init__(self, count, folder, **settings):
        self._settings = settings  # of the servers
        self.names = [f"host{n}" for n in range(count)]
        self.addresses = [f"10.79.0.{n + 1}" for n in range(count)]
        self._spaces = [f"ssh{os.getpid()}-{n}" for n in range(count)]
        self._bridge, self.folder, self.config = f"bs{os.getpid()}", Path(folder), Path(folder) / "config"

    def on(self, number, *command):
        """The command, run on a host."""
        return ["ip", "netns", "exec", self._spaces[number], *command]

    def kill(self, number, argument):
        """Kill the host's processes with this argument."""
        pids = subprocess.run(["ip", "netns", "pids", self._spaces[number]], check=True, capture_output=True, text=True)
        for pid in pids.stdout.split():
            if argument in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                os.kill(int(pid), signal.SIGKILL)

    def _end_all(self, space):
        pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout.split()
        for pid in map(int, pids):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

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
        run("ip", "link", "add", self._bridge, "type", "bridge")
        self._ends.callback(run, "ip", "link", "delete", self._bridge)
        run("ip", "link", "set", self._bridge, "up")
        for n, (space, address) in enumerate(zip(self._spaces, self.addresses, strict=True)):
            run("ip", "netns", "add", space)
            self._ends.callback(run, "ip", "netns", "delete", space)
            self._ends.callback(self._end_all, space)
            port = f"{self._bridge}p{n}"
            run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            run("ip", "link", "set", port, "master", self._bridge, "up")
            run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                run("ip", "-n", space, "link", "set", device, "up")
        for name in ("client", "server"):
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        shutil.copy(self.folder / "client.pub", self.folder / "authorized")
        Path("/run/sshd").mkdir(exist_ok=True)
        settings = {
            "HostKey": self.folder / "server",
            "AuthorizedKeysFile": self.folder / "authorized",
            "StrictModes": "no",
            "UsePAM": "no",
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "no",
            "PidFile": "none",
            **self._settings,
        }
        (self.folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        lines = [
            f"Host {name}\n  HostName {address}\n" for name, address in zip(self.names, self.addresses, strict=True)
        ]
        lines += [f"Host *\n  IdentityFile {self.folder / 'client'}\n  IdentitiesOnly yes\n  User root\n"]
        lines += ["  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n"]
        self.config.write_text("".join(lines))
        for n in range(1, len(self.names)):
            server = self.on(n, SSHD, "-D", "-e", "-f", str(self.folder / "sshd_config"))
            process = subprocess.Popen(server, stderr=subprocess.DEVNULL)
            self._ends.callback(process.wait)
            self._ends.callback(process.terminate)
        for name in self.names[1:]:
            until_s = time.monotonic() + 10
            asked = self.on(0, "ssh", "-F", str(self.config), name, "true")
            while subprocess.run(asked, capture_output=True).returncode:
                assert time.monotonic() < until_s, "sshd does not answer"
                time.sleep(0.2)

    def launch(self, hosts, *arguments, **settings):
        """``pipetrain launch --hosts`` as a process on the first host."""
        command = [*self.on(0, sys.executable, "-m", "pipetrain", "launch", "--ssh", f"ssh -F {self.config}")]
        command += ["--python", PYTHON, "--hosts", hosts, *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **settings
        )


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)
