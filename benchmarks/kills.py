"""Kill training with ``kill -9`` at random moments, over all schemes: does it end as if nobody had?

A run is one way to train a small network, with checkpoints at every third step. Its controller, or one of its workers,
is killed five times: at the start, in a step, while a checkpoint is written, while one is read, while state goes to the
memory of hosts (which a worker that is killed may take with it), and again before anything new was saved. Each time it
is run again, until it ends. Its weights, the optimizer's slots and its last epoch's loss must then be, to the bit,
those of a run that nobody disturbed. That one has no checkpoints, but where each of them takes a drain.

Every run is a line of the output, so that this can be stopped and gone on with. The exit status is 1 if a run ended
with something else, went on from a step that nobody had seen, or did not end; the command that repeats such a run is
printed. Clocks decide where exactly a kill comes: try that command some times.

examples:
  python benchmarks/kills.py --hours 1
  python benchmarks/kills.py --kills 40 --way spectrain --way all-reduce
  python benchmarks/kills.py --seed 3 --run 17
  python benchmarks/kills.py --summary
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

for _threads in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # NumPy's would be there before the first fork
    os.environ.setdefault(_threads, "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from benchmarks.killed import EVERY, STEP_S, STEPS, WAYS, Life, forked, lives, works  # noqa: E402
from pipetrain.cluster.supervision import LOST  # noqa: E402
from pipetrain.logs import text_table  # noqa: E402

MOMENTS = ("start", "step", "write", "read", "again")  # the last: before anything new was saved
OF_MEMORY = "replicate"  # the moment beside them of ways that have every call's state in memory
HOST_IS_LOST = 0.5  # how likely a killed worker's memory is lost with it
KILLS_OF_RUN = 5
LIFE_S = 150.0  # in which a training process ends, or has lost a worker
PLACES = {  # what begins, and how long it takes at most
    "write": ("writing", 0.15),
    "read": ("reading", 0.1),
    OF_MEMORY: ("replicating", 0.05),
}

UNWRITTEN = "could not be written"  # of a checkpoint


class Plan(NamedTuple):
    """When a process is killed: so long after the ``count``-th event of a kind; ``victim`` -1 is the controller."""

    moment: str
    event: str
    count: int
    delay_s: float
    victim: int


class Failed(Exception):
    """A run did not end as it has to."""


class Lived(NamedTuple):
    """What a life came to: whether it was killed, its exit status, and all that it said, with times."""

    killed: bool
    status: int
    said: list[tuple[float, list[Any]]]

    def times(self, event: str) -> list[float]:
        """When it said so."""
        return [at_s for at_s, (name, *_) in self.said if name == event]

    def last(self, event: str) -> Any:
        """What it said of it at last; None if nothing."""
        return next((said[1] for _, said in reversed(self.said) if said[0] == event), None)

    @property
    def place(self) -> str:
        """Where it was when it ended."""
        counts = Counter(name for _, (name, *_) in self.said)
        for moment, (event, _) in PLACES.items():
            if counts[event] > counts[f"{event} over"]:
                return moment
        return "step" if counts["step"] else "start"


class Cluster:
    """The workers of a run, which are started anew at their addresses."""

    def __init__(self, count: int, log: Path, memory: Path | None) -> None:
        self._log, self._memory = log, memory
        self.pids = [0] * count
        self.ports = [0] * count
        for n in range(count):
            self.ports[n] = self._started(n)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all workers."""
        return tuple(f"127.0.0.1:{port}" for port in self.ports)

    def _started(self, n: int) -> int:
        cores = sorted(os.sched_getaffinity(0))
        self.pids[n], source = forked(partial(works, self.ports[n], cores[n % len(cores)], self.memory(n)), self._log)
        with os.fdopen(source) as announced:
            address = announced.readline()
        if not address:
            raise Failed(f"worker {n} did not start")
        return int(address.rpartition(":")[2])

    def memory(self, n: int) -> Path | None:
        """The folder that stands for the memory of a worker's host."""
        return self._memory and self._memory / f"host-{n}"

    def kill(self, n: int) -> None:
        """With ``kill -9``."""
        os.kill(self.pids[n], signal.SIGKILL)
        os.waitpid(self.pids[n], 0)
        self.pids[n] = 0

    def renew(self) -> None:
        """Start those anew that were killed."""
        for n, pid in enumerate(self.pids):
            if not pid:
                self._started(n)

    def end(self) -> None:
        """End them all."""
        for n, pid in enumerate(self.pids):
            if pid:
                self.kill(n)


def lived(life: Life, plan: Plan | None, cluster: Cluster | None, log: Path) -> Lived:
    """One training process, to its end or until it is killed. Raises Failed if it does neither."""
    begun_s, until_s = time.monotonic(), time.monotonic() + LIFE_S
    pid, source = forked(partial(lives, life), log)
    said: list[tuple[float, list[Any]]] = [(0.0, ["forked"])]
    due_s = begun_s + plan.delay_s if plan and plan.event == "forked" else math.inf
    killed, left = False, b""
    try:
        while True:
            now_s = time.monotonic()
            if now_s > until_s:
                raise Failed(f"a training process did not end within {LIFE_S:.0f} s; it was in {_place(said)}")
            if plan and not killed and now_s >= due_s:
                killed = True
                if plan.victim < 0:
                    os.kill(pid, signal.SIGKILL)
                elif cluster is not None:
                    cluster.kill(plan.victim)
            wait_s = min(due_s if not killed else math.inf, until_s) - time.monotonic()
            if not select.select([source], [], [], max(wait_s, 0))[0]:
                continue
            read = os.read(source, 1 << 16)
            if not read:
                break
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                said.append((time.monotonic() - begun_s, json.loads(line)))
                if plan and said[-1][1][0] == plan.event and len(_times(said, plan.event)) == plan.count:
                    due_s = time.monotonic() + plan.delay_s
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(source)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Lived(killed and not _times(said, "end"), status, said)


def _times(said: Sequence[tuple[float, list[Any]]], event: str) -> list[float]:
    return [at_s for at_s, (name, *_) in said if name == event]


def _place(said: list[tuple[float, list[Any]]]) -> str:
    return f"{Lived(True, 0, said).place}, {said[-1]}"


def _went_on(found: Lived, killed: list[dict[str, Any]], done: int, saved: int) -> int:
    """The last step that callbacks have seen, with those of a life; what kills before it have cost is noted.

    Raises Failed where that life did not go on from a step that was seen, and not before the one that was ``saved``.
    """
    resumed = found.last("resumed")
    if resumed is None:
        return done
    for each in killed:
        if each["resumed"] is None:
            each |= {"resumed": resumed, "repeated": each["step"] - resumed}
    if not saved <= resumed <= done:
        raise Failed(f"went on from step {resumed}, when {done} had been seen and {saved} saved")
    steps = [said[1] for _, said in found.said if said[0] == "step"]
    if steps != [(resumed + n) % STEPS for n in range(len(steps))]:
        raise Failed(f"went on from step {resumed} with the minibatches {steps}")
    return resumed + len(steps)


class Kept:
    """From which step a life goes on at least: what is on the disk, and in the memory of hosts until both have lost it.

    ``lost`` are the hosts whose memory has been lost since a state was last there.
    """

    def __init__(self) -> None:
        self._on_disk = self._in_memory = 0
        self.lost: set[int] = set()

    @property
    def step(self) -> int:
        """The newest that there is."""
        return max(self._on_disk, self._in_memory)

    def learn(self, found: Lived) -> None:
        """Of a life."""
        self._on_disk = found.last("writing over") or self._on_disk
        listed = found.last("listing over")
        if listed is not None:
            self._in_memory, self.lost = listed, set()

    def lose(self, host: int) -> None:
        """The memory of a host is lost."""
        self.lost.add(host)
        if len(self.lost) > 1:
            self._in_memory = 0


class Trial:
    """Runs of one way, beside the undisturbed one."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name, self._way, self._folder = name, WAYS[name], folder
        folder.mkdir(parents=True)
        self._log, self._memory = folder / "log.txt", folder / "memory"
        self._whole: Lived | None = None
        self._takes_s: dict[str, float] = {}  # until an event, in the fastest of all lives

    @property
    def whole(self) -> Lived:
        """The undisturbed run."""
        if self._whole is None:
            with ExitStack() as ends:
                cluster = self._cluster(ends)
                where = self._folder / "whole" if self._way.drains else None
                life = Life(self._way, where, workers=cluster.addresses if cluster else ())
                found = lived(life, None, cluster, self._log)
            if found.status:
                raise RuntimeError(f"{self._name} does not train: {self._told()[-2000:]}")
            self._whole = found
            self._learn(found)
        return self._whole

    def _cluster(self, ends: ExitStack) -> Cluster | None:
        if not self._way.workers:
            return None
        cluster = Cluster(self._way.workers, self._log, self._memory if self._way.memory else None)
        ends.callback(cluster.end)
        return cluster

    def _told(self) -> str:
        """What processes wrote."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def run(self, number: int, seed: int, kills: int = KILLS_OF_RUN) -> dict[str, Any]:
        """A run that is killed so often; what came of each kill, and whether it ended as the undisturbed one."""
        chance, folder = random.Random(f"{seed}/{number}"), self._folder / str(number)
        record: dict[str, Any] = {"seed": seed, "number": number, "way": self._name, "kills": [], "why": ""}
        begun_s = time.monotonic()
        try:
            _ = self.whole
            self._log.unlink(missing_ok=True)
            with ExitStack() as ends:
                self._go_through(record, chance, folder, self._cluster(ends), kills)
        except Failed as error:
            record |= {"why": str(error), "told": self._told()[-2000:]}
        finally:
            for each in (folder, self._memory):
                shutil.rmtree(each, ignore_errors=True)
        return record | {"took_s": round(time.monotonic() - begun_s, 1)}

    def _go_through(
        self, record: dict[str, Any], chance: random.Random, folder: Path, cluster: Cluster | None, kills: int
    ) -> None:
        done, kept = 0, Kept()  # the last step that callbacks have seen, and that from which a life goes on at least
        killed: list[dict[str, Any]] = record["kills"]
        for count in range(kills + 1):
            plan = self._planned(chance, kept.step > 0) if count < kills else None
            stretched = plan is not None and plan.moment in PLACES
            memory = self._memory / "controller" if self._way.memory else None
            life = Life(self._way, folder, stretched, cluster.addresses if cluster else (), memory)
            told = len(self._told())
            found = lived(life, plan, cluster, self._log)
            self._learn(found)
            is_alone = plan is None or plan.victim < 0  # else what a worker has cannot be had
            if is_alone and UNWRITTEN in self._told()[told:]:
                raise Failed(f"a training process told: {UNWRITTEN}")
            done, before = _went_on(found, killed, done, kept.step), kept.step
            kept.learn(found)
            if not found.killed:
                return self._compare(found)
            expected = -signal.SIGKILL if plan and plan.victim < 0 else LOST
            if found.status != expected and not (expected == LOST and found.place == "start" and found.status == 1):
                raise Failed(f"the training process ended with status {found.status} after {plan}, in {found.place}")
            if cluster and plan and plan.victim >= 0 and self._way.memory and chance.random() < HOST_IS_LOST:
                shutil.rmtree(cluster.memory(plan.victim) or "", ignore_errors=True)
                kept.lose(plan.victim)
            if cluster:
                cluster.renew()
            killed.append(
                {
                    "moment": found.place,
                    "victim": "controller" if plan and plan.victim < 0 else "worker",
                    "again": bool(killed) and kept.step == before,
                    "hosts_lost": len(kept.lost),
                    "step": done,
                    "resumed": None,
                }
            )
        raise Failed("the last life was killed")

    def _learn(self, found: Lived) -> None:
        for event in ("training", "step"):
            for at_s in found.times(event)[:1]:
                self._takes_s[event] = min(at_s, self._takes_s.get(event, at_s))

    def _planned(self, chance: random.Random, saves: bool) -> Plan:
        """The next kill. Times are those of the fastest life: a slower machine would let others end before it."""
        can = [each for each in MOMENTS if saves or each not in ("read", "again")]
        can += [OF_MEMORY] * 2 * self._way.memory
        moment = chance.choice(can)
        victim = chance.randrange(-1, self._way.workers)
        first_s = self._takes_s["step"]
        if moment == "start":
            return Plan(moment, "forked", 1, chance.uniform(0, first_s), victim)
        if moment == "again":
            return Plan(moment, "reading over", 1, chance.uniform(0, first_s - self._takes_s["training"]), victim)
        if moment == "step":
            return Plan(moment, "step", chance.randrange(1, 3 * EVERY), chance.uniform(0, 2 * STEP_S), victim)
        event, takes_s = PLACES[moment]
        most = (
            1
            if moment == "read" or (moment == "write" and self._way.memory)
            else 3 * EVERY
            if moment == OF_MEMORY
            else 3
        )
        return Plan(moment, event, chance.randrange(1, most + 1), chance.uniform(0, takes_s), victim)

    def _compare(self, found: Lived) -> None:
        if found.status:
            raise Failed(f"the training process ended with status {found.status}, and nobody had killed it")
        here, there = found.last("end"), self.whole.last("end")
        different = [name for name, each in here.items() if there.get(name) != each]
        missing = there.keys() - here.keys() - {"loss", "accuracy"}  # of a life that had nothing left to do
        if different or missing:
            raise Failed(f"other values than those of an undisturbed run: {', '.join([*different, *missing])}")


def records(path: Path) -> list[dict[str, Any]]:
    """The lines of an output, without one that was cut off."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def summary(found: Sequence[dict[str, Any]]) -> str:
    """Tables of kills by way and by moment."""
    ways = dict.fromkeys(each["way"] for each in found)
    rows = []
    for name in ways:
        runs = [each for each in found if each["way"] == name]
        kills = [kill for each in runs for kill in each["kills"]]
        rows.append((name, *_counts(kills), f"{sum(not each['why'] for each in runs)} of {len(runs)}"))
    kills = [kill for each in found for kill in each["kills"]]
    total = ("all", *_counts(kills), f"{sum(not each['why'] for each in found)} of {len(found)}")
    head = ("kills", "resumed", "steps repeated, median", "at most")
    moments: list[tuple[str, ...]] = []
    for victim in ("controller", "worker"):
        for moment, text in (("start", "at the start"), ("step", "in a step"), ("write", "while writing"),
                             ("read", "while reading"), (OF_MEMORY, "while replicating")):  # fmt: skip
            those = [each for each in kills if each["moment"] == moment and each["victim"] == victim]
            if those:
                moments.append((f"{victim}, {text}", *_counts(those)))
    for text, those in (
        ("twice in a row, nothing saved between", [each for each in kills if each["again"]]),
        ("with the memory of a host", [each for each in kills if each.get("hosts_lost") == 1]),
        ("with the memory of both hosts", [each for each in kills if each.get("hosts_lost") == 2]),
    ):
        moments.append((text, *_counts(those)))
    return "\n\n".join(
        (
            text_table(("way", *head, "runs equal"), [*sorted(rows), total]),
            text_table(("moment", *head), moments),
        )
    )


def _counts(kills: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    repeated = [each["repeated"] for each in kills if each.get("repeated") is not None]
    middle, most = (f"{median(repeated):g}", str(max(repeated))) if repeated else ("", "")
    return str(len(kills)), str(sum(each.get("resumed") is not None for each in kills)), middle, most


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, help="how long to go on (default: until as many kills)")
    parser.add_argument("--kills", type=int, help="how many kills, those in the output among them (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices (default: 0)")
    parser.add_argument("--way", action="append", choices=WAYS, help="several times if wanted (default: all)")
    parser.add_argument("--run", type=int, help="this run alone, whose number a failure names; nothing is kept of it")
    parser.add_argument("--output", type=Path, default=Path("kills.jsonl"), help="lines of JSON (default: kills.jsonl)")
    parser.add_argument("--summary", action="store_true", help="only the tables of the output so far")
    options = parser.parse_args(arguments)
    names = options.way or list(WAYS)
    found = [] if options.run is not None else records(options.output)
    if not options.summary:
        with tempfile.TemporaryDirectory(prefix="kills-") as folder:
            _collect(options, names, found, Path(folder))
    print(summary(found))
    failures = [each for each in found if each["why"]]
    for each in failures:
        way = "".join(f" --way {json.dumps(name)}" for name in options.way or ())
        print(f"\n{each['way']}: {each['why']}\n{each.get('told', '')}")
        print(f"Repeat it: python benchmarks/kills.py --seed {each['seed']} --run {each['number']}{way}")
    return 1 if failures else 0


def _collect(options: argparse.Namespace, names: Sequence[str], found: list[dict[str, Any]], folder: Path) -> None:
    """Add the records of runs to those that there are, until it is time."""
    trials: dict[str, Trial] = {}
    until_s = time.monotonic() + options.hours * 3600 if options.hours else math.inf
    most = options.kills or (math.inf if options.hours else 1000)
    known = {(each["seed"], each["number"]) for each in found}
    begun_s, number = time.monotonic(), -1
    while True:
        number = options.run if options.run is not None else number + 1
        kills = sum(len(each["kills"]) for each in found)
        if (kills >= most or time.monotonic() >= until_s) or (options.run is not None and found):
            break
        if (options.seed, number) in known:
            continue
        name = names[number % len(names)]
        if name not in trials:
            trials[name] = Trial(name, folder / str(len(trials)))
        record = trials[name].run(number, options.seed)
        found.append(record)
        if options.run is None:
            with options.output.open("a") as output:
                output.write(json.dumps(record) + "\n")
        _show(found, begun_s, most, until_s)
    print(file=sys.stderr)


def _show(found: Sequence[dict[str, Any]], begun_s: float, most: float, until_s: float) -> None:
    """A line that says how far it is."""
    kills = sum(len(each["kills"]) for each in found)
    bad = sum(bool(each["why"]) for each in found)
    now_s = time.monotonic()
    part = max(kills / most, (now_s - begun_s) / (until_s - begun_s))
    bar = "=" * int(30 * min(part, 1))
    what = f"{kills} kills, {bad} of {len(found)} runs failed, {(now_s - begun_s) / 60:.0f} min"
    print(f"\r[{bar:30}] {what}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
