"""The paper's Table 1 as a command: intervals, gathering, the table, the figure, a run of it."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from experiments import intervals, results, table1, training
from experiments.records import Settings, Summary
from plots import table1 as plot
from plots.style import smoothed


def test_intervals_are_students():
    """Three values 1, 2, 3: deviation 1, t = 4.303 at two degrees of freedom."""
    mean, half = intervals.interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    assert intervals.interval([5.0]) == (5.0, None)
    assert intervals.interval([5.0, 5.0]) == (5.0, 0.0)
    with pytest.raises(ValueError, match="no mean of nothing"):
        intervals.interval([])


def test_quantiles_go_on_without_a_jump():
    assert intervals.quantile(31) == pytest.approx(2.0395, abs=1e-4)
    assert intervals.quantile(120) == pytest.approx(1.9799, abs=1e-4)
    several = [intervals.quantile(n) for n in range(1, 200)]
    assert several == sorted(several, reverse=True)
    with pytest.raises(ValueError, match="freedom=0"):
        intervals.quantile(0)


def test_intervals_are_shown():
    assert intervals.shown([1.0, 2.0, 3.0], 2) == "2.00 ± 2.48"
    assert intervals.shown([0.5], 3) == "0.500"
    assert intervals.shown([], 3) == "-"
    assert intervals.shown([1.0, 1.0], 1, signed=True) == "+1.0 ± 0.0"


def written(output, scheme, seed, accuracy, model="snn", diverged_at=None, **different):
    """A run's folder, by hand: three rows of history."""
    settings = Settings(scheme, model, "fashion_mnist_small", 4, 128, 60, 0.01, 0.9, 20, seed, 4, {"width": 8})
    settings = replace(settings, **different)
    summary = Summary(scheme, model, settings.dataset, 4, 128, 60, 1.0, 1 - accuracy, 2.0, accuracy, 0, diverged_at)
    folder = results.folder(output, settings)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(settings)))
    (folder / "summary.json").write_text(json.dumps(asdict(summary)))
    rows = [{"step": 20 * n, "train_loss": 1 / n, "val_loss": 2 / n, "val_accuracy": accuracy} for n in (1, 2, 3)]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Two seeds of three schemes, vanilla's second diverged, and one run that has not ended."""
    for scheme, accuracies in {"single": (0.8, 0.9), "vanilla": (0.95, 0.3), "spectrain": (0.79, 0.88)}.items():
        for seed, accuracy in enumerate(accuracies):
            written(tmp_path, scheme, seed, accuracy, diverged_at=41 if accuracy == 0.3 else None)
    (written(tmp_path, "spectrain", 2, 0.99) / "summary.json").unlink()
    return tmp_path


def test_the_table_has_means_differences_and_the_paper(runs):
    (section,) = results.sections(results.gather(runs))
    assert section.header[5:] == ("against single, points", "the paper", "diverged")
    rows = {row[0].text: [cell.text for cell in row] for row in section.rows}
    assert list(rows) == ["single", "vanilla", "spectrain"]
    assert rows["spectrain"] == ["spectrain", "2", *rows["spectrain"][2:4], "83.50 ± 57.18", "-1.50 ± 6.35", "0", ""]
    assert rows["vanilla"][-2:] == ["-0.55", "at step 41 in 1 of 2 seeds"]
    assert [[cell.best for cell in row[4:5]] for row in section.rows] == [[True], [False], [False]]
    assert "| single | 2 | **0.1500 ± 0.6353** |" in results.markdown([section])
    assert "85.00 ± 63.53 *" in results.text([section])


def test_the_tables_figures_are_kept_as_csv(runs):
    """With the columns of the page's file; a mean has no half width where it is of one seed."""
    written(runs, "2bw", 0, 0.5)
    assert table1.main(["--gather", "--output", str(runs)]) == 0
    rows = [*csv.DictReader((runs / "table1.csv").open(encoding="utf-8"))]
    page = Path(__file__).parents[2] / "docs" / "results" / "table1.csv"
    assert [*rows[0]] == [*csv.DictReader(page.open(encoding="utf-8")).fieldnames]
    by = {(each["scheme"], each["figure"]): each for each in rows}
    assert len(by) == len(rows) == 4 * 4 - 1  # of `single` there is no difference from itself
    figure = by["spectrain", "against single, points"]
    assert float(figure["mean"]) == pytest.approx(-1.5)
    assert float(figure["half_width"]) == pytest.approx(6.35, abs=0.01)
    alone = by["2bw/M=4", "min training loss"]
    assert (alone["mean"], alone["half_width"]) == ("0.5", "")


def test_the_optimizer_is_said_and_has_a_rate_of_its_own(tmp_path):
    (run,) = table1.planned(table1.parse(["--model=snn", "--optimizer=adamw", "--seeds=1", "--scheme=single"]))
    assert (run.optimizer, run.learning_rate) == ("adamw", 1e-3)
    written(tmp_path, "single", 0, 0.8, optimizer="adamw")
    (section,) = results.sections(results.gather(tmp_path))
    assert "; adamw 0.01; " in section.about


def test_a_network_without_its_reference(tmp_path):
    written(tmp_path, "spectrain", 0, 0.5, "residual_lstm")
    (section,) = results.sections(results.gather(tmp_path))
    assert section.header[-1] == "max validation accuracy, %"
    assert [cell.text for cell in section.rows[0]] == ["spectrain", "1", "0.5000", "2.0000", "50.00"]
    assert not any(cell.best for cell in section.rows[0])


def test_the_figure_says_what_diverged(runs):
    histories = plot.read(runs)["snn"]["vanilla"]
    steady, note = plot.chosen(histories)
    assert (len(steady), note) == (1, "diverged at step 41 in 1 of 2 seeds, not drawn")
    assert plot.chosen([(rows, 41) for rows, _ in histories])[1] == "diverged at step 41, 41 in 2 of 2 seeds"
    assert plot.means([*steady, steady[0][:2]], "train_loss") == ([20, 40], [1, 0.5])
    assert smoothed([1, 2, 6, 4, 5], 2) == [1, 3, 4, 5, 4.5]
    assert plot.draw(runs, runs / "table1.png").stat().st_size > 10_000
    assert (runs / "table1.svg").exists()


TINY = ("--width", "8", "--depth", "3", "--stages", "2", "--steps", "6", "--eval-every", "3", "--learning-rate", "0.01")


@pytest.fixture
def main(monkeypatch):
    """The command line in this process, whose TensorFlow has started."""
    monkeypatch.setattr(table1, "start_tensorflow", lambda devices: None)
    return table1.main


@pytest.mark.wide
def test_what_has_ended_is_not_repeated(main, tmp_path, capsys):
    options = ("--model", "snn", *TINY, "--seeds", "1", "--output", str(tmp_path))
    assert main([*options, "--scheme", "spectrain"]) == 0
    first = tmp_path / "snn" / "spectrain" / "seed0"
    assert {path.name for path in first.iterdir()} == {"config.json", "history.jsonl", "summary.json"}
    then = (first / "summary.json").stat().st_mtime_ns
    assert main([*options, "--scheme", "spectrain", "--scheme", "single"]) == 0
    said = capsys.readouterr().out
    assert "2 runs, 1 of them ended already" in said
    assert {"against", "single,", "points"} <= {*said.split()}
    assert (first / "summary.json").stat().st_mtime_ns == then
    assert "| single | 1 |" in (tmp_path / "table1.md").read_text()
    assert (tmp_path / "table1.png").exists()
    assert main([*options, "--momentum", "0.5"]) == 2
    assert "Received: snn with momentum 0.9 and 0.5." in capsys.readouterr().err


@pytest.mark.slow
def test_variants_of_a_scheme_are_rows_of_their_own(main, tmp_path, capsys):
    options = ("--model", "snn", *TINY, "--seeds", "1", "--output", str(tmp_path))
    names = ("spectrain", "spectrain/target/M=2", "2bw/1.5")
    assert main([*options, *(each for name in names for each in ("--scheme", name))]) == 0
    found = {path.parts[-3] for path in tmp_path.glob("*/*/*/summary.json")}
    assert found == {"spectrain", "spectrain-target-M2", "2bw-1.5"}
    table = (tmp_path / "table1.md").read_text()
    assert all(f"| {name} | 1 |" in table for name in names)
    with pytest.raises(SystemExit):
        table1.parse(["--scheme", "vanilla/target"])
    assert "horizon='target', scheme='vanilla'" in capsys.readouterr().err


def test_a_command_that_is_stopped_says_how_to_go_on(main, tmp_path, monkeypatch, capsys):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "train", stop)
    assert main(["--model", "snn", *TINY, "--output", str(tmp_path)]) == 130
    assert "the same command" in capsys.readouterr().err


def test_stages_with_replicas_and_the_published_size():
    options = table1.parse(["--model", "snn", "--published", "--replicas", "2", "1", "1", "--seeds", "1"])
    planned = table1.planned(options)
    assert {each.devices for each in planned} == {4}
    assert [(each.scheme, each.layout) for each in planned][:2] == [
        ("data-parallel", {"stages": 4}),
        ("vanilla", {"stages": 3, "replicas": (2, 1, 1)}),
    ]
    summary = Summary("vanilla", "snn", "", 3, 128, 60, 1.0, 1.0, 2.0, 0.5, 0, None)
    (section,) = results.sections([results.Run(planned[1], summary)])
    assert section.about.startswith("size as published") and section.about.endswith("3 stages on 2-1-1 devices")


def test_differences_are_against_both_references_where_both_were_run(tmp_path):
    for scheme, accuracy in {"data-parallel": 0.8, "single": 0.7, "vanilla": 0.75}.items():
        written(tmp_path, scheme, 0, accuracy)
    (section,) = results.sections(results.gather(tmp_path))
    assert section.header[-3:] == ("against data-parallel, points", "against single, points", "the paper")
    rows = {row[0].text: [cell.text for cell in row[-3:]] for row in section.rows}
    assert rows == {
        "single": ["-10.00", "", ""],
        "data-parallel": ["", "+10.00", ""],
        "vanilla": ["-5.00", "+5.00", "-0.55"],
    }


def test_sizes_are_for_the_networks_that_have_them(main, tmp_path, capsys):
    options = table1.parse(["--model", "snn", "--model", "vgg16", "--depth", "3", "--width", "8", "--seeds", "1"])
    planned = table1.planned(options)
    assert [each.size for each in planned[::4]] == [{"depth": 3, "width": 8}, {"width": 8}]
    assert [each.learning_rate for each in planned[::4]] == [1e-3, 2e-3]
    assert main(["--model", "vgg16", "--depth", "3", "--output", str(tmp_path)]) == 2
    assert "vgg16 has no depth" in capsys.readouterr().err


def test_the_protocol_is_the_papers_unless_told(main, tmp_path, capsys):
    planned = table1.planned(table1.parse([]))
    assert len(planned) == 6 * 4 * 3
    assert {(each.steps, each.batch_size, each.eval_every, each.stages) for each in planned} == {(5000, 128, 20, 4)}
    assert [each.scheme for each in planned[:4]] == ["data-parallel", "vanilla", "weight-stashing", "spectrain"]
    assert [each.seed for each in planned[:12:4]] == [0, 1, 2]
    assert main(["--gather", "--output", str(tmp_path)]) == 2
    assert "No run has ended there" in capsys.readouterr().err


@pytest.mark.slow
def test_differences_at_the_start_of_training(main, tmp_path):
    """All schemes learn; spectrain stays nearer to one device than vanilla does."""
    options = (
        "--model",
        "snn",
        "--depth",
        "6",
        "--width",
        "32",
        "--learning-rate",
        "0.01",
        "--steps",
        "200",
        "--seeds",
        "1",
    )
    schemes = [part for name in ("single", *table1.SCHEMES) for part in ("--scheme", name)]
    assert main([*options, *schemes, "--output", str(tmp_path)]) == 0
    (section,) = results.sections(results.gather(tmp_path))
    accuracy = {row[0].text: float(row[4].text.split()[0]) for row in section.rows}
    assert min(accuracy.values()) > 60
    assert accuracy["single"] == pytest.approx(accuracy["data-parallel"], abs=1)
    assert accuracy["spectrain"] > accuracy["vanilla"]
