"""What profiles, partitions, choices and traces show of themselves: pictures, HTML, rows."""

from __future__ import annotations

import copy
import csv
import importlib
import io
import math
import pickle
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import matplotlib
import pytest
from matplotlib.figure import Figure

from pipetrain.pictures.figure import shortened
from pipetrain.plan import pictures
from pipetrain.plan.cluster import Cluster, Level, Link
from pipetrain.plan.memory import Training
from pipetrain.plan.partition import partition, plan
from pipetrain.plan.profile import BlockProfile, Profile, Seconds
from pipetrain.simulation.every_way import choose
from pipetrain.simulation.simulator import simulate
from pipetrain.trace.trace import Trace

CLUSTER = Cluster((Level(Link(2e9)),), memory_bytes=10**8)
EVIL = "<script>alert('&')</script>"


def profiled(count=6, **more):
    blocks = tuple(
        BlockProfile(EVIL if n == 0 else f"b{n}", (1 + n) * 1e-3, 2e-3, 10**5, 10**6, 10**6, 1e-4) for n in range(count)
    )
    return Profile("made <up>", 32, blocks, **{"spread": 0.05, "loss_s": 1e-4, "metric_s": 1e-4, **more})


PROFILE = profiled()
CUT = plan(PROFILE, [2, 4, 6], CLUSTER)
CHOICE = choose(PROFILE, 3, CLUSTER)
TRACE = simulate(CUT, "1f1b", CLUSTER, 6, microbatches=4)
TRIED = CHOICE.with_trials([(way, math.inf if n else way.step_s / 2) for n, way in enumerate(CHOICE.near)])
SHOWN = {"profile": PROFILE, "partition": CUT, "choice": TRIED, "trace": TRACE, "explanation": TRIED.explained(CUT)}
DRAWN = [name for name in SHOWN if name != "explanation"]


class Seen(HTMLParser):
    """The cells of tables, and all text; refuses tags that do not match, and such as run or load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.rows, self.text = [], [], ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        assert tag in ("div", "strong", "table", "thead", "tbody", "tr", "th", "td")
        assert all(key == "style" for key, _ in attributes)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.mark.parametrize("name", DRAWN)
def test_each_is_drawn_and_saved(name, tmp_path):
    figure = SHOWN[name].plot(tmp_path / "figure.png")
    assert isinstance(figure, Figure)
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert all(axes.get_xlabel() for axes in figure.axes)
    assert figure.get_facecolor() == (1, 1, 1, 1)
    SHOWN[name].plot(str(tmp_path / "figure.svg"))
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def test_the_style_that_the_user_has_set_stays_out_of_pictures():
    with matplotlib.style.context("dark_background"):
        figure = CUT.plot()
    assert figure.axes[0].xaxis.label.get_color() == "black"


def texts(figure):
    """All that is written in its panels, and the labels of the first one's rows."""
    rows = [each.get_text() for each in figure.axes[0].get_yticklabels()]
    return {each.get_text() for axes in figure.axes for each in axes.texts}, rows


def test_a_partition_marks_the_device_that_all_wait_for_and_the_fullest():
    figure = CUT.plot()
    written, rows = texts(figure)
    assert any(each.startswith(f"bottleneck: {CUT.slowest_s * 1e3:.3g} ms") for each in written)
    assert any(each.startswith(f"fullest: {CUT.fullest_bytes / 2**20:.3g} MiB") for each in written)
    assert len(rows) == 3 and rows[2].endswith("device 2")
    (bar,) = [bar for bar in figure.axes[0].patches if bar.get_linewidth() == 2]
    assert bar.get_width() == pytest.approx(CUT.slowest_s * 1e3)
    assert bar.get_y() + bar.get_height() / 2 == pytest.approx(2)


def test_the_parts_of_a_bar_are_what_its_device_takes():
    for cut in (CUT, partition(profiled(9), 4, CLUSTER, replicas=(2, 1, 1))):
        for together in cut.on_devices:
            total_s = sum(stage.total_s for stage in together)
            assert sum(pictures._parts(together)) == pytest.approx(total_s)


def test_a_device_of_several_stages_is_one_row():
    cut = partition(profiled(8), 2, CLUSTER, training=Training("interleaved", microbatches=2))
    _, rows = texts(cut.plot())
    assert [row.count("stage") for row in rows] == [2, 2]


def test_a_profile_shows_what_xla_would_take_and_what_is_estimated():
    one = PROFILE.blocks[1]
    blocks = (PROFILE.blocks[0], *(BlockProfile(**{**vars(one), "name": "x", "compiled": Seconds(1e-3, 1e-3, 1e-4)}),))
    blocks += (BlockProfile(**{**vars(one), "name": "y", "estimated": True}),)
    (legend,) = Profile("m", 32, blocks).plot().legends
    assert {"estimated", "all of it with XLA"} <= {each.get_text() for each in legend.get_texts()}
    assert len(texts(profiled(200).plot())[1]) < 60  # not every name where they would overlap


def test_a_choice_marks_the_way_taken_and_says_what_became_of_the_others():
    written, rows = texts(TRIED.plot())
    assert {"taken", "refused in a trial"} <= written
    assert len(rows) == len(CHOICE.ways)
    (legend,) = TRIED.plot().legends
    assert [each.get_text() for each in legend.get_texts()] == ["predicted ±10%", "measured in a trial"]


def test_a_timeline_begins_where_it_is_told():
    assert texts(TRACE.plot(first=0, minibatches=4))[0] >= {"0", "1", "2", "3", "v0"}
    assert TRACE.plot(title="mine").axes[0].get_title(loc="left") == "mine"
    assert "3 stages" in TRACE.plot().axes[0].get_title(loc="left")
    with pytest.raises(ValueError, match="nothing in the trace"):
        Trace().plot()


@pytest.mark.parametrize("name", SHOWN)
def test_html_has_the_table_and_no_tags_of_names(name):
    seen = Seen(SHOWN[name]._repr_html_())
    assert len({len(row) for row in seen.rows[:3]}) == 1
    if name in ("profile", "partition", "explanation"):
        assert EVIL in seen.text and "made <up>" in seen.text


def test_html_says_what_the_text_says():
    """Every word of the tables as they print is in the HTML, too."""
    for shown in (PROFILE, CUT, TRIED, SHOWN["explanation"]):
        html = Seen(shown._repr_html_()).text.replace("\xa0", " ")
        assert not {word for word in str(shown).split() if word.strip("-") and word not in html}


def test_an_empty_trace_shows_that():
    assert "0 actions" in Trace()._repr_html_()


def test_rows_are_written_and_read_back(tmp_path):
    columns = {
        "profile": ("forward_s", [block.forward_s for block in PROFILE.blocks]),
        "partition": ("total_s", [stage.total_s for stage in CUT.stages]),
        "choice": ("step_s", sorted(way.step_s for way in CHOICE.ways)),
        "trace": ("start_s", TRACE.spans.start_s.tolist()),
    }
    for name, (column, values) in columns.items():
        SHOWN[name].to_csv(tmp_path / f"{name}.csv")
        rows = [*csv.DictReader(io.StringIO((tmp_path / f"{name}.csv").read_text(encoding="utf-8")))]
        assert [float(row[column]) for row in rows] == values
    assert next(csv.DictReader((tmp_path / "profile.csv").open()))["name"] == EVIL


def test_pandas_gets_the_columns_and_is_asked_for_by_name(monkeypatch):
    frames = SimpleNamespace(DataFrame=dict)
    monkeypatch.setitem(sys.modules, "pandas", frames)
    found = CUT.to_pandas()
    assert found["stage"] == [0, 1, 2] and found["first"][0] == EVIL
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        CUT.to_pandas()


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch):
    for name in [each for each in sys.modules if each.startswith(("pipetrain.pictures.figure", "pipetrain.plan.pic"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "pipetrain\[plot\]"'):
        importlib.import_module("pipetrain.plan.pictures")


def test_nothing_is_imported_for_pictures_that_nobody_asks_for():
    said = (
        "import sys, pipetrain.plan.choice, pipetrain.trace.idle, pipetrain.simulation.simulator;"
        "print([each for each in ('matplotlib', 'pandas', 'tensorflow', 'keras') if each in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "[]\n"


def test_an_explanation_is_a_string_like_any_other():
    said = SHOWN["explanation"]
    assert said.startswith("made <up>: 3 stages") and said.partition("\n")[1] == "\n"
    assert said.choice is TRIED and said.cut is CUT
    assert copy.copy(said) == said and copy.copy(said).cut is CUT
    plain = pickle.loads(pickle.dumps(CHOICE.explained(CUT).cut))
    assert plain == CUT
    assert "way to train" in CHOICE.explained(note="a note") and CHOICE.explained(note="a note").endswith("a note")


def test_long_names_are_shortened_in_the_middle():
    for name, most, short in (("abc", 3, "abc"), ("abcdefgh", 5, "ab…gh"), ("abcdefgh", 4, "ab…h")):
        assert shortened(name, most) == short and len(short) <= most
