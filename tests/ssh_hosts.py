"""Hosts with OpenSSH's server each, as network namespaces of this machine; needs root, iproute2 and sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import namespaces

ROOT = Path(__file__).parents[1]
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
MISSING = [name for name, there in {**namespaces.NEEDED, "sshd": SSHD}.items() if not there]


class SshHosts(namespaces.Namespaces):
    """A context: hosts ``0`` to ``count - 1``; every one but the first has an sshd.

    ``names`` are those of the hosts for OpenSSH, by the file ``config``.
    """

    def __init__(self, count, folder, **settings):
        super().__init__(count, "10.79.0")
        self._settings = settings  # of the servers
        self.names = [f"host{n}" for n in range(count)]
        self.folder, self.config = Path(folder), Path(folder) / "config"

    def _make(self):
        super()._make()
        for name in ("client", "server"):
            namespaces.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
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
            self.start(server)
        for name in self.names[1:]:
            asked = self.on(0, "ssh", "-F", str(self.config), name, "true")
            namespaces.wait(lambda asked=asked: not subprocess.run(asked, capture_output=True).returncode, "sshd")

    def launch(self, hosts, *arguments, path=(), path_there=(), **settings):
        """``pipetrain launch --hosts`` as a process on the first host; folders before others on the path of modules."""
        path, path_there = (":".join(map(str, [*folders, ROOT])) for folders in (path, path_there))
        command = [*self.on(0, sys.executable, "-m", "pipetrain", "launch", "--ssh", f"ssh -F {self.config}")]
        command += [
            "--python",
            f"env PYTHONPATH={path_there} TF_CPP_MIN_LOG_LEVEL=2 {sys.executable}",
            "--hosts",
            hosts,
            *map(str, arguments),
        ]
        environment = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **settings
        )
