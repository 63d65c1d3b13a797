"""``pipetrain launch``: starts workers, runs a script on them, and ends all with it."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipetrain.cli.arguments import Folded, count, port, positive_number
from pipetrain.cluster.hosts import is_loopback, launched_worker, split
from pipetrain.cluster.membership import Member, expanded, member_of, without_port
from pipetrain.cluster.server import GONE_S
from pipetrain.cluster.ssh_workers import SshWorkers
from pipetrain.cluster.supervision import ScriptRun
from pipetrain.logs import quiet_stderr

ABOUT = """Run a script on several hosts, or on several workers of this one, and end all with it.

A worker process starts on each host and serves its GPUs, or its CPU where it has none. The script runs here, in a
process that has joined them: its PipelineModel uses their devices by default, and nothing of it has to change. What the
hosts write comes here with their names before each line; the exit status is the script's.

With --hosts the workers are started by OpenSSH, and reached through its tunnels alone: they listen on loopback
interfaces only, and no port is open on a network. OpenSSH must reach each host without a password (a key that ssh-agent
holds, for example), and find the same Python with the same versions there.

Within srun, mpirun, an indexed job of Kubernetes, or where TF_CONFIG names this worker, the same line is run once for
each host: each process becomes a worker, and the first one runs the script as well. There is no OpenSSH between them:
--plain says that their network is trusted, since TensorFlow's servers ask for no password and encrypt nothing.

Where a worker is lost, the script's fit raises WorkerLost. With --wait or --elastic the script then runs again, on
workers that are back, were started anew, or are left: with the callback PipelineCheckpoint, its fit goes on from the
newest checkpoint.
"""
EXAMPLES = """examples:
  pipetrain launch --local 4 train.py
  pipetrain launch --hosts a,b,c train.py --epochs 3
  pipetrain launch --hosts localhost,gpu[1-3] -m my.training
  srun -N4 pipetrain launch --plain train.py
  mpirun -n 2 -host a,b pipetrain launch --plain --hosts a,b train.py
"""


def add(commands: Any) -> None:
    """Add the command to those there are."""
    command = commands.add_parser(
        "launch",
        help="run a script on several hosts, or on several workers of this one",
        description=ABOUT,
        epilog=EXAMPLES,
        formatter_class=Folded,
    )
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--local", type=count, metavar="N", help="so many workers on this machine, on cores of their own"
    )
    where.add_argument(
        "--hosts", metavar="LIST", help="of the workers, such as a,b or node[1-4]; localhost is this machine"
    )
    option = command.add_argument
    option("--cpu-devices", type=count, default=1, metavar="N", help="logical CPU devices of a worker (default: 1)")
    option(
        "--python",
        type=_command,
        metavar="COMMAND",
        help=f"Python on the hosts (default: {Path(sys.executable).name}, by its path)",
    )
    option(
        "--ssh",
        type=_command,
        metavar="COMMAND",
        help="OpenSSH's client with options of yours (default: ssh)",
    )
    option("--plain", action="store_true", help="workers are reached without OpenSSH, by a network that you trust")
    option(
        "--port",
        type=_known_port,
        metavar="N",
        help="of a host's first worker, with --plain (default: 2222; Slurm: by job)",
    )
    option(
        "--job",
        metavar="NAME",
        help="what tells workers, with --plain, from another job's at the same ports (default: the scheduler's number "
        "of it, or the first worker's address)",
    )
    option("--status-port", type=port, metavar="N", help="a page of the script's training, http://127.0.0.1:N/")
    option(
        "--wait",
        type=positive_number,
        metavar="SECONDS",
        help="for lost workers, then run the script again (see above)",
    )
    option("--elastic", action="store_true", help="without workers that do not come back, run the script again")
    option("-m", dest="module", action="store_true", help="the script is a module's name, as for python -m")
    option("script", help="the script to run, a file")
    option("arguments", nargs=argparse.REMAINDER, metavar="...", help="those of the script")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the script; its exit status. Raises ValueError, OSError for what cannot be launched."""
    if options.status_port is not None:
        os.environ["PIPETRAIN_STATUS_PORT"] = str(options.status_port)
    _check_script(options)
    arguments = [*(["-m"] if options.module else []), options.script, *options.arguments]
    if options.local is not None:
        _check_unread(options, (*OF_SSH, *OF_MEMBERS), f"--local {options.local}")
        return _local(options, arguments)
    hosts = [] if options.hosts is None else expanded(options.hosts)
    member = member_of(os.environ, hosts, options.port)
    if member is not None:
        _check_unread(options, OF_SSH, f"a process of {member.scheduler}")
        return _as_member(member, options, arguments)
    if not hosts:
        raise ValueError(
            "Nothing says where to train: no --hosts, no --local, and neither Slurm, MPI, Kubernetes nor TF_CONFIG has "
            "started this process. Try --local 2, or --hosts a,b, before the script's name."
        )
    if options.plain:
        raise ValueError(
            "With --plain every host starts its own process, which a scheduler does. Received: --plain, --hosts "
            f"{options.hosts}. Try it within srun or mpirun, or leaving --plain out."
        )
    _check_unread(options, OF_MEMBERS, f"--hosts {options.hosts}")
    return _by_ssh(hosts, options, arguments)


# Options that are read where OpenSSH starts the workers, and where a scheduler does.
OF_SSH, OF_MEMBERS = ("python", "ssh"), ("plain", "port", "job")


def _check_unread(options: argparse.Namespace, names: Sequence[str], where: str) -> None:
    """Raise ValueError for those of these options that are given: nothing reads them there."""
    unread = [f"--{name}" for name in names if getattr(options, name)]
    if unread:
        raise ValueError(
            f"Workers that are started in this way have no such option. Received: {' and '.join(unread)}, {where}. "
            "Try leaving it out."
        )


def _check_script(options: argparse.Namespace) -> None:
    """Raise ValueError, SyntaxError for a script that cannot be run, as far as this is known without running it."""
    name, path = options.script, Path(options.script)
    if not options.module and not path.is_file():
        what = "This script is a folder" if path.is_dir() else "There is no such script"
        raise ValueError(f"{what}. Received: {name!r}. Try the path of a file, or -m and a module's name.")
    if not options.module and not os.access(path, os.R_OK):
        raise ValueError(f"This script may not be read. Received: {name!r}. Try another user, or chmod.")
    if not options.module and path.suffix == ".py":  # Python would find it only when the workers have started
        compile(path.read_bytes(), os.path.abspath(name), "exec", dont_inherit=True)
    if options.module and (not name or name.startswith(".") or "/" in name or name.endswith(".py")):
        raise ValueError(f"-m takes a module's name. Received: -m {name!r}. Try a name such as my.training, or no -m.")


def _local(options: argparse.Namespace, arguments: list[str]) -> int:
    with quiet_stderr():  # of what TensorFlow greets with
        from pipetrain.cluster.local_workers import LocalWorkers

    with LocalWorkers(options.local, options.cpu_devices) as workers:
        return ScriptRun(arguments, workers.addresses, *_again(options), workers.renew).run()


def _by_ssh(hosts: list[str], options: argparse.Namespace, arguments: list[str]) -> int:
    ssh = options.ssh or ["ssh"]
    hosts = _for_ssh(hosts, ssh)
    gone_s, python = GONE_S + (options.wait or 0), options.python or []
    with SshWorkers(hosts, options.cpu_devices, python, ssh, _forward, gone_s) as workers:
        for address, host in workers.names.items():
            _forward(
                host, f"a worker at {address}, through OpenSSH" if host != "localhost" else f"a worker at {address}"
            )
        return ScriptRun(arguments, workers.addresses, *_again(options), workers.renew, workers.names).run()


def _for_ssh(hosts: Sequence[str], ssh: Sequence[str]) -> list[str]:
    """The hosts as OpenSSH takes them. Raises ValueError for what it would not take."""
    found = []
    for host in hosts:
        try:
            found.append(without_port(host))
        except ValueError as error:
            raise ValueError(
                f"OpenSSH takes a host's port by an option, but {error}. Received: --hosts with {host}. "
                "Try --ssh 'ssh -p 2200', or a line Port in ~/.ssh/config."
            ) from error
    twice = next((host for host in found if found.count(host) > 1), None)
    if twice is not None:
        raise ValueError(
            f"Each host has one worker. Received: --hosts with {twice} twice. Try each host once; --cpu-devices is how "
            "many devices a worker has."
        )
    if shutil.which(ssh[0]) is None and {*found} != {"localhost"}:
        raise ValueError(
            f"There is no such program. Received: --ssh {shlex.join(ssh)}. Try OpenSSH's client, by its path."
        )
    return found


def _command(text: str) -> list[str]:
    """A program with options, as a shell takes it."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no command: {str(error).lower()}") from error
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no command")
    return found


def _known_port(text: str) -> int:
    if number := port(text):
        return number
    raise argparse.ArgumentTypeError("0 is a port that the other processes would not know")


def _again(options: argparse.Namespace) -> tuple[float | None, bool]:
    """How long lost workers are waited for, and whether the script goes on without them."""
    return options.wait, options.elastic


def _forward(host: str, line: str) -> None:
    print(f"[{host}] {line}", flush=True)


def _as_member(member: Member, options: argparse.Namespace, arguments: list[str]) -> int:
    """This process' worker, and the script if it is the first one."""
    if not options.plain and not all(map(is_loopback, member.addresses)):
        raise ValueError(
            f"{member.scheduler} has started the workers, which reach each other without OpenSSH: whoever reaches "
            f"their ports can run code. Received: {', '.join(member.addresses)}. Try --plain if the network is trusted."
        )
    host, number = split(member.address)
    job = options.job or member.job
    worker = launched_worker(number, options.cpu_devices, GONE_S + (options.wait or 0), "--address", host, "--job", job)
    if member.number > 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hands it to the script, which drains
        with subprocess.Popen(worker, stdin=subprocess.PIPE, start_new_session=True) as process:
            status = process.wait()  # the first one says when it has ended
            return status if status >= 0 else 128 - status
    source, sink = os.pipe()
    worker += ["--announce", str(sink)]
    with subprocess.Popen(worker, stdin=subprocess.PIPE, pass_fds=[sink], start_new_session=True) as process:
        os.close(sink)
        try:
            with os.fdopen(source) as announced:
                if not announced.readline():  # its port is in use: whoever answers there is another's
                    return process.wait()
            is_named = options.job is not None or member.is_named
            return ScriptRun(arguments, list(member.addresses), *_again(options), job=job, is_named=is_named).run()
        finally:
            process.terminate()
