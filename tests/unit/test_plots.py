"""Every figure from run files made by hand, and the page that gathers them."""

from __future__ import annotations

import importlib
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from experiments import run
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import BlockProfile, Profile
from pipetrain.schemes.transfers.plan import Message, Phase, Plan, Workload
from pipetrain.simulation.data_parallel import Setting, simulate_plan
from pipetrain.simulation.simulator import simulate
from pipetrain.trace import timeline as pictured
from pipetrain.trace.records import Span, Transfer
from pipetrain.trace.trace import Trace
from plots import (
    benchmarks,
    breakdown,
    command,
    comparison,
    learning_curves,
    memory,
    report,
    rmse,
    runs,
    speedup,
    staleness,
    throughput,
    timeline,
    traffic,
    transfers,
)

SLOW_LINK = Cluster((Level(Link(2e8)),))
BLOCKS = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 10**5, 10**6, 10**6) for n in range(3))
CUT = plan(Profile("made up", 32, BLOCKS), [1, 2, 3], SLOW_LINK)
SCHEMES = {"single": 100.0, "vanilla": 180.0, "gpipe": None}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def compared(folder, schemes=SCHEMES, rows=45):
    """What experiments/run.py leaves, by hand."""
    for scheme, speed in schemes.items():
        config = {"scheme": scheme, "model": "snn", "dataset": "made up", "stages": 3, "batch_size": 32}
        results = {"max_val_accuracy": 0.5, "min_train_loss": 1.5, "min_val_loss": None, "peak_memory_bytes": 2**28}
        diverged = 7 if speed is None else None
        write(folder / scheme / "config.json", {**config, "learning_rate": 0.01, "size": {"width": 8}})
        write(folder / scheme / "summary.json", {**results, "samples_per_second": speed, "diverged_at": diverged})
        history = [{"step": n, "train_loss": 1 / n, "val_loss": 2 / n, "val_accuracy": 0.5} for n in range(1, rows)]
        history.append({"step": rows, "train_loss": float("nan"), "val_loss": float("inf"), "val_accuracy": 0.1})
        (folder / scheme / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))
        stages = [{"memory_bytes": each.memory_bytes} for each in CUT.stages]
        write(folder / scheme / "partition.json", {"stages": stages[:1] if scheme == "single" else stages})
        alone = plan(Profile("made up", 32, BLOCKS), [3])
        simulate(alone if scheme == "single" else CUT, scheme, SLOW_LINK, 12).save(folder / scheme / "trace.json")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of each kind of experiment."""
    folder = tmp_path_factory.mktemp("made")
    compared(folder / "all")
    rows = [{"step": n, "horizon": s, "stale": 2e-3, "predicted": 1e-3, "best": 9e-4} for n in (1, 2) for s in (1, 2)]
    about = {"model": "snn", "dataset": "made up", "stages": 2, "scheme": "spectrain", "optimizer": "adam"}
    write(folder / "rmse" / "config.json", {**about, "learning_rate": 0.1, "horizons": [1, 2]})
    (folder / "rmse" / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"depth": 2, "width": 8, "steps": 9, "batch_size": 8, "momentum": 0.9, "seeds": 2}
    write(
        folder / "staleness" / "config.json",
        {**sizes, "policy": ["vanilla"], "stages": [2, 4], "learning_rate": [0.1]},
    )
    means = [{"policy": "vanilla", "stages": n, "learning_rate": 0.1, "mean": 0.5, "half_width": 0.1} for n in (2, 4)]
    write(folder / "staleness" / "summary.json", {"rows": [{**row, "diverged": 0} for row in means]})
    sent = {"model": "snn", "data_parallel_bytes": 10**8, "pipeline_bytes": 10**6, "ratio": 100}
    write(folder / "traffic" / "traffic.json", {"batch_size": 32, "devices": 3, "networks": [sent]})
    parts = {"compute_s": 2.0, "transfer_s": 1.0, "imbalance_s": 0.0, "fill_s": 0.5, "against_single": 1.5}
    ways = [{"model": "snn", "devices": 2, "way": way, **parts} for way in ("single", *speedup.LOOKS)]
    said = {"says": "a gain", "paper": 0.985, "ours": {"ring": 1.1, "server": 3.0}}
    said["agrees"] = {"ring": True, "server": False}
    platform = {"batch_size": 32, "device": {"name": "P40"}, "outcomes": ways, "statements": [said]}
    write(folder / "speedup" / "speedup.json", platform)
    seed = folder / "table1" / "snn" / "vanilla" / "seed0"
    write(seed / "summary.json", {"scheme": "vanilla", "model": "snn", "diverged_at": None})
    (seed / "history.jsonl").write_text((folder / "all" / "vanilla" / "history.jsonl").read_text())
    (folder / "table1" / "table1.md").write_text("### snn\n\nwidth 8.\n\n| scheme | x |\n|---|---:|\n| one | **2** |\n")
    return folder


class Page(HTMLParser):
    """What a page shows; refuses tags that do not match, and whatever would be loaded from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.seen = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)
        assert tag not in ("script", "link", "iframe", "object")
        for key, value in attributes:
            assert key not in ("src", "srcset", "href") or value.startswith("data:image/")
        if tag == "img":
            self.images.append(dict(attributes)["alt"])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.seen.append(data)

    @property
    def text(self):
        return " ".join(self.seen)


@pytest.mark.parametrize(
    ("draw", "where"),
    [
        (throughput.draw, "all"),
        (breakdown.draw, "all"),
        (transfers.draw, "all"),
        (memory.draw, "all"),
        (learning_curves.draw, "all"),
        pytest.param(rmse.draw, "rmse", marks=pytest.mark.wide),
        (staleness.draw, "staleness"),
        (traffic.draw, "traffic/traffic.json"),
    ],
)
def test_every_figure_is_drawn_twice(made, tmp_path, draw, where):
    of_runs = where == "all"
    picture = draw([made / where] if of_runs else made / where, tmp_path / "figure.png")
    assert picture.stat().st_size > 10_000
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_runs_are_found_wherever_they_lie(made):
    names = [[run.scheme for run in those] for those in runs.find([made / "all"])]
    assert names == [["single", "vanilla", "gpipe"]]
    (those,) = runs.find([made / "all" / "vanilla", made / "all" / "single"])
    assert [run.scheme for run in those] == ["single", "vanilla"]
    assert runs.throughput(those) == {"single": 100, "vanilla": 180}
    assert those[0].values("val_accuracy")[1][-1] == 0.1
    with pytest.raises(ValueError, match="There is no run"):
        runs.find([made / "traffic"])


def spans(*each):
    """Stage, minibatch, start and end of forwards."""
    return [Span("F", stage, i, f"d{stage}", start, end, i) for stage, i, start, end in each]


def test_time_is_shared_out_by_hand():
    """Stage 1 waits 1 s for stage 0 and 2 s for the transfer, then 1 s for stage 0 alone."""
    sent = [Transfer("F", 1, 0, 0, 1, 0, 8, 3.0, 5.0)]
    trace = Trace.of(spans((0, 0, 0, 1), (1, 0, 1, 2), (0, 1, 2, 3), (1, 1, 5, 6)), sent)
    shares = breakdown.shares(trace)
    assert shares == pytest.approx((4 / 8, 2 / 8, 2 / 8, 2 / 8))
    assert sum(shares[:3]) == pytest.approx(1)


def test_pauses_are_left_out():
    """In ten steps of 1 s, 100 s in which nothing is under way."""
    late = [100.0 * (n >= 5) for n in range(10)]
    actions = [(("F", "B")[half], n, n + half / 2 + late[n]) for n in range(10) for half in (0, 1)]
    trace = Trace.of(Span(op, 0, n, "d", start, start + 0.5, n) for op, n, start in actions)
    assert breakdown.without_pauses(trace).duration_s == pytest.approx(10)
    assert breakdown.shares(trace) == pytest.approx((1, 0, 0, 0))
    assert len(breakdown.middle(trace).spans) == 12


@pytest.mark.parametrize("scheme", ["single", "vanilla", "gpipe"])
def test_shares_of_simulated_runs_sum_to_the_whole(made, scheme):
    (run,) = runs.find([made / "all" / scheme])[0]
    shares = breakdown.shares(run.trace())
    assert sum(shares[:3]) == pytest.approx(1)
    assert np.all(np.array(shares) >= -1e-9)
    assert (shares.for_transfers > 0.01) == (scheme == "gpipe") or scheme == "vanilla"


def test_what_is_sent_is_counted_for_each_update(made):
    """What crosses the two cuts goes down, and comes back up."""
    (run,) = runs.find([made / "all" / "vanilla"])[0]
    crossing = sum(stage.output_bytes for stage in CUT.stages[:-1])
    assert transfers.sent_bytes(run.trace()) == {"F": crossing, "B": crossing, "R": 0, "W": 0}


@pytest.mark.wide
def test_the_page_has_everything_and_needs_nothing(made):
    folders = [made / name for name in ("all", "rmse", "staleness", "traffic", "speedup", "table1")]
    output = report.write(folders, made / "report.html")
    text = output.read_text(encoding="utf-8")
    page = Page(text)
    assert not re.search(r"https?://|url\(|@import", re.sub(r"base64,[\w+/=]+", "", text))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert len(page.images) == 5 + 3 + 6  # of the comparison, its timelines, the studies
    assert len(set(page.images)) == len(page.images)
    assert all(page.images)
    for said in ("1.80x", "at step 7", "256 MiB", "width 8", "snn on made up, 3 stages, batch 32"):
        assert said in page.text
    assert "<strong>2</strong>" in text
    assert "<strong>110.0%</strong>" in text
    assert "<strong>300.0%</strong>" not in text
    assert "missing" not in page.text
    assert text.count("<figcaption>") == len(page.images)


@pytest.mark.wide
def test_the_page_says_what_is_missing(tmp_path, capsys):
    folder = compared(tmp_path / "all", {"single": 100.0, "vanilla": 180.0, "gpipe": 90.0})
    for name in ("trace.json", "partition.json"):
        (folder / "single" / name).unlink()
        (folder / "vanilla" / name).unlink()
    (folder / "gpipe" / "trace.json").write_text("{")
    (folder / "gpipe" / "partition.json").unlink()
    (folder / "vanilla" / "summary.json").unlink()
    (folder / "vanilla" / "history.jsonl").unlink()
    write(folder / "2bw" / "config.json", ["not settings"])
    (tmp_path / "empty").mkdir()
    assert report.main([str(folder), str(tmp_path / "empty")]) == 0
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    for said in (
        "vanilla has not ended",
        "The timelines of single, vanilla: no trace was kept.",
        "The trace of gpipe: A run's file cannot be read",
        "The figure 'memory': No run says how the model was cut.",
        "empty: there is no run in it.",
        "2bw/config.json",
    ):
        assert said in page.text
    assert len(page.images) == 2
    assert report.main([str(tmp_path / "empty")]) == 2
    assert "There is nothing to show. Received" in capsys.readouterr().err


def test_a_figure_without_anything_to_draw_is_refused(tmp_path, capsys):
    folder = compared(tmp_path, {"gpipe": None}, rows=1)
    (folder / "gpipe" / "history.jsonl").write_text("")
    with pytest.raises(ValueError, match="No run has a history"):
        learning_curves.draw([folder], tmp_path / "figure.png")
    assert command.main(throughput.__doc__, throughput.draw, [str(folder)]) == 2
    assert "long enough to measure" in capsys.readouterr().err
    assert not (tmp_path / "throughput.png").exists()


def test_a_run_too_short_to_be_validated_has_no_curves(tmp_path):
    folder = compared(tmp_path, {"gpipe": None})
    summaries = [SimpleNamespace(scheme="gpipe")]
    assert run.pictures(folder, summaries).endswith(f"report.py {folder}\n{folder / 'learning_curves.png'}")
    (folder / "gpipe" / "history.jsonl").write_text("")
    assert run.pictures(folder, summaries) == f"All figures on one page: python plots/report.py {folder}"


@pytest.mark.wide
def test_the_pictures_of_schedules_are_drawn(tmp_path, monkeypatch, capsys):
    from plots import schedules

    monkeypatch.setattr("sys.argv", ["schedules.py", "--output", str(tmp_path)])
    schedules.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    names = ("1f1b", "gpipe", "interleaved", "spectrain", "zb-h1", "zb-v")
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


@pytest.mark.wide
def test_the_pictures_of_plans_are_drawn(tmp_path):
    from plots import plans

    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 10**5, 10**6, 10**6) for n in range(8))
    names = ("profile", "partition", "choice", "trace")
    assert plans.draw(Profile("made up", 64, blocks), SLOW_LINK, tmp_path) == [tmp_path / f"{n}.png" for n in names]


@pytest.mark.wide
def test_what_a_timeline_cannot_show_is_refused_with_what_can_be(tmp_path, capsys):
    made = tmp_path / "trace.json"
    with_drains(9, ()).save(made)
    Trace().save(tmp_path / "empty.json")
    for given, said in {
        (str(tmp_path / "nothing"),): "There is no trace. Received:",
        (str(tmp_path / "empty.json"),): "There is nothing in the trace.",
        (str(made), "--first", "505"): "The trace has no such minibatches. Received: first=505, minibatches=12. Try",
        (str(made), "--output", str(tmp_path / "none" / "t.png")): "No such file or directory. Received: ",
        (str(made), "--output", str(tmp_path / "t.mp3")): "mp3",
    }.items():
        assert timeline.main(given) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and " Try " in line
    assert timeline.main([str(made), "--first", "8"]) == timeline.main([str(made)]) == 0


@pytest.mark.parametrize(
    "name",
    ["rmse", "staleness", "table1", "traffic", "speedup", "over_time", "stability", "grid_scaling", "balance_scaling"],
)
def test_a_folder_without_results_is_refused_with_the_program_that_makes_them(name, tmp_path, capsys):
    draw = importlib.import_module(f"plots.{name}").draw
    files = {"traffic": "traffic.json", "speedup": "speedup.json", "grid_scaling": "grid_scaling.csv"}
    file = {**files, "balance_scaling": "balance_scaling.csv"}.get(name, "")
    for content in ("", "{", "{}", "[]"):
        if content:
            for path in ("config.json", "summary.json", "history.jsonl", f"{name}.json", f"{name}.csv"):
                (tmp_path / path).write_text(content)
        assert command.of_folder("", draw, f"experiments/{name}.py", f"{name}.png", file, [str(tmp_path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "Received: " in line and " Try " in line


def drawn(monkeypatch, trace, tmp_path, **chosen):
    """A timeline's axes and the labels of its legend."""
    kept = []
    monkeypatch.setattr(timeline, "save", lambda figure, path: kept.append(figure) or path)
    timeline.draw(trace, tmp_path / "timeline.png", **chosen)
    (figure,) = kept
    (axes,), (legend,) = figure.axes, figure.legends
    return axes, [text.get_text() for text in legend.get_texts()]


def test_a_timeline_shows_why_stages_are_idle(tmp_path, monkeypatch):
    """Stage 1 waits 1 s for stage 0 and 2 s for the transfer: a grey bar, and a hatched one, in its own row."""
    sent = [Transfer("F", 1, 0, 0, 1, 0, 8, 3.0, 5.0)]
    trace = Trace.of(spans((0, 0, 0, 1), (1, 0, 1, 2), (0, 1, 2, 3), (1, 1, 5, 6)), sent)
    axes, labels = drawn(monkeypatch, trace, tmp_path, first=0)
    assert labels == ["forward", *(pictured.LABELS[cause] for cause in ("transfer", "imbalance", "fill"))]
    bars = {
        (round(bar.get_y() + bar.get_height() / 2), round(bar.get_x()), round(bar.get_width()), bar.get_hatch())
        for bar in axes.patches
    }
    hatch = {cause: look.get("hatch") for cause, look in pictured.IDLE.items()}
    assert {(1, 3000, 2000, hatch["transfer"]), (1, 2000, 1000, hatch["imbalance"])} <= bars
    assert [text.get_text() for text in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    assert {"0", "1"} < {text.get_text() for text in axes.texts}
    assert "Large: the minibatch." in axes.get_xlabel()


def test_a_timeline_of_devices_with_several_stages_has_a_row_for_each_of_these(tmp_path, monkeypatch):
    blocks = tuple(BlockProfile(f"b{n}", 1e-3, 2e-3, 10**3, 10**3, 10**3) for n in range(4))
    cut = partition(Profile("made up", 32, blocks), 2, SLOW_LINK, training=Training("interleaved", microbatches=2))
    trace = simulate(cut, "interleaved", SLOW_LINK, 4, microbatches=2)
    assert trace.devices_are_shared and not simulate(CUT, "1f1b", SLOW_LINK, 4).devices_are_shared
    axes, labels = drawn(monkeypatch, trace, tmp_path, first=0)
    assert labels == ["forward", "backward and update"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["device:0", "device:1"]
    assert {"0", "s0", "s3"} <= {text.get_text() for text in axes.texts}
    assert "Large: the microbatch. Small, below it: the stage." in axes.get_xlabel()


def with_drains(steps, drains, late=()):
    """Two stages of 1 s; after each of the drains both begin anew, what is ``late`` takes 9 s more."""
    found, now = [], 0.0
    for n in range(steps):
        now += n in drains
        for stage in (0, 1):
            for op in ("F", "B"):
                found.append(Span(op, stage, n, f"d{stage}", now, now + 0.5, n))
        now += 10 if n in late else 1
    return Trace.of(found, starts=[0, *drains])


def test_a_timeline_is_of_a_part_that_is_as_most_are():
    """Not at a drain, nor at an evaluation; of whole minibatches."""
    for drains, late in (((), ()), ((50,), ()), ((), (50,)), ((25, 50, 75), (10, 60)), (tuple(range(6, 100, 6)), ())):
        first = pictured.first_of_steady(with_drains(100, drains, late), 4)
        assert 25 <= first < 75
        assert not {*range(first + 1, first + 4)} & {*drains} and not {*range(first, first + 3)} & {*late}
    assert pictured.first_of_steady(with_drains(3, ()), 12) == 0
    assert pictured.first_of_steady(Trace(), 12) == 0
    trace = simulate(CUT, "gpipe", SLOW_LINK, 20, microbatches=4)
    assert pictured.pieces(trace) == 4
    assert pictured.first_of_steady(trace, 12) % 4 == 0


def test_packs_of_a_plan_are_in_the_timeline_with_what_is_out_of_order(tmp_path):
    workload = Workload.chain([10, 300, 10], [1.0] * 3, message=Message(0.1, 0.01))
    setting = Setting(workload, 2, True, Cluster((Level(Link(100.0, 0.1)),)))
    pulls, pushes = (Phase(tuple(workload.pack([n]) for n in range(3)), window) for window in (2, 0))
    trace = simulate_plan(setting, Plan(pulls, pushes), 3)
    axes = Figure().subplots()
    labels = [each.get_label() for each in pictured.draw_messages(axes, trace, {0: 1, 1: 3}, 0.0, trace.duration_s + 1)]
    assert labels == [
        pictured.MESSAGE_LABELS["W"],
        pictured.MESSAGE_LABELS["R"],
        pictured.MESSAGE_LABELS["inverted"],
        "first used",
    ]
    assert len(axes.patches) == len(trace.transfers) == 3 * 6
    assert timeline.draw(trace, tmp_path / "drawn.png", 1, 2).exists()
    assert pictured.pieces(trace) == 1  # though backwards wait in between, and so are several spans
    assert transfers.sent_bytes(trace) == {"F": 0, "B": 0, "R": 320, "W": 320}


def test_the_page_says_which_stages_xla_compiled(tmp_path):
    kernels = {"vanilla": [False, False], "spectrain": [True, True], "gpipe": [False, True], "1f1b": [False, True]}
    for scheme, compiled in kernels.items():
        write(tmp_path / scheme / "config.json", {"scheme": scheme})
        write(tmp_path / scheme / "partition.json", {"stages": [{"compiled": each} for each in compiled]})
    read = {scheme: runs.read(tmp_path / scheme) for scheme in kernels}
    assert comparison.kernels([read["spectrain"]]) == "XLA"
    together = comparison.kernels(list(read.values()))
    assert together == "vanilla: TensorFlow's; spectrain: XLA; gpipe, 1f1b: XLA in stage 1"


def test_the_benchmarks_tables_are_drawn():
    """From the files beside the pages of the documentation, whose figures are nowhere else."""
    upper, lower = benchmarks.two_cores().axes
    assert [len(panel.patches) for panel in (upper, lower)] == [12, 24]
    assert max(bar.get_width() for bar in upper.patches) == 1.69
    assert len(benchmarks.hosts().axes[0].lines) == 4 * 19 + 4 + 1
    assert benchmarks.memory().axes[0].get_xlim()[1] > 6
    assert len(benchmarks.accuracy().axes[0].containers) == 6
