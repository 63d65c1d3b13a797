"""The benchmark's table, and PyTorch's twins where PyTorch is installed."""

import os
import subprocess
import sys

import pytest

from benchmarks import instruction_sets, throughput
from benchmarks.networks import COMPARED, build
from benchmarks.sides import Figures, KerasJob, plain_names
from benchmarks.throughput import Options, header, prediction_error, rows, teams


def test_ratios_are_of_one_round_and_of_the_own_framework():
    rounds = [
        {
            "Keras, 1 core": Figures(100.0 * speed),
            "Keras, 1 core, XLA": Figures(50.0 * speed),
            "spectrain": Figures(180.0 * speed, 2.0),
            "PyTorch, 1 core": Figures(40.0 * speed),
            "PyTorch Schedule1F1B": Figures(60.0 * speed, 1.5),
        }
        for speed in (1, 2, 5)  # a machine that drifts
    ]
    lines = {line[0]: line[1:] for line in rows(rounds)}
    assert lines["spectrain"] == ("360", "1.80", "1.80 - 1.80", "", "2.00", "90%", "")
    assert lines["PyTorch Schedule1F1B"] == ("120", "1.50", "1.50 - 1.50", "", "1.50", "100%", "")
    assert lines["Keras, 1 core, XLA"] == ("100", "0.50", "0.50 - 0.50", "", "", "", "")
    assert {len(line) for line in rows(rounds)} == {len(header(gpus=False))}


def test_ratios_are_to_the_fastest_plain_keras_alone_and_at_once():
    rounds = [
        {
            "Keras, 1 core": Figures(100.0),
            "Keras, 1 core, oneDNN, XLA": Figures(200.0),
            "Keras, 2 cores, XLA": Figures(900.0),
            "Keras, 1 core, 2 at once": Figures(390.0),
            "Keras, 1 core, 2 at once, oneDNN": Figures(400.0),
            "vanilla": Figures(380.0),
        }
    ]
    lines = {line[0]: line[1:] for line in rows(rounds)}
    assert lines["vanilla"] == ("380", "1.90", "1.90 - 1.90", "0.95", "", "", "")
    assert lines["Keras, 1 core"][:2] == ("100", "0.50")


def test_predictions_are_compared_within_a_round():
    rounds = [{"Keras, 1 core": Figures(100.0), "1f1b": Figures(speed, None, 1.1 * speed)} for speed in (90.0, 180.0)]
    assert prediction_error(rounds, "1f1b") == pytest.approx(0.1)
    assert prediction_error(rounds, "Keras, 1 core") is None
    assert [line[-1] for line in rows(rounds)] == ["", "+10.0%"]


def _plain(options: Options) -> list[tuple[str | None, int, int]]:
    jobs = [team[0] for team in teams(COMPARED["dense"], options) if isinstance(team[0], KerasJob)]
    return [(job.onednn, job.cores, int(job.rank is not None)) for job in jobs if not job.schemes]


@pytest.mark.parametrize(
    ("by_itself", "isa", "settings"), [(True, None, [None]), (False, None, [None, "1"]), (True, "avx2", ["0", "1"])]
)
def test_plain_keras_runs_with_every_setting_of_onednn(monkeypatch, by_itself, isa, settings):
    monkeypatch.setattr(instruction_sets, "is_on_by_itself", lambda: by_itself)
    options = Options(["spectrain"], 8, 1, with_torch=False, isa=isa)
    assert _plain(options) == [(each, *way) for each in settings for way in ((1, 0), (2, 0), (1, 1))]


def test_pipetrain_runs_with_what_its_import_sets_or_would_set_on_a_masked_processor(monkeypatch):
    options = Options(["spectrain"], 8, 1, with_torch=False)
    for value in ("1", "0"):
        monkeypatch.setenv(instruction_sets.ONEDNN, value)
        assert teams(COMPARED["dense"], options)[-1][0].onednn == value
        assert teams(COMPARED["dense"], options._replace(isa="avx2"))[-1][0].onednn == "1"


def test_plain_keras_on_gpus_is_one_process():
    options = Options(["spectrain"], 8, 1, with_torch=False, gpus=4)
    (plain,), (ours,) = teams(COMPARED["dense"], options)
    assert (plain.cores, plain.gpus, ours.cores, ours.gpus) == (1, True, 4, True)


def test_names_say_which_kernels_there_are():
    assert plain_names("core", at_once=True) == {
        "Keras, 1 core, 2 at once": False,
        "Keras, 1 core, 2 at once, XLA": True,
        "Keras, 1 core, 2 at once, oneDNN": False,
        "Keras, 1 core, 2 at once, oneDNN, XLA": True,
    }
    assert [*plain_names("GPU", onednn=[False])] == ["Keras, 1 GPU", "Keras, 1 GPU, XLA"]


def test_a_mask_keeps_other_flags_of_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/nowhere")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    environment = dict(os.environ)
    monkeypatch.setattr(os, "environ", environment)
    instruction_sets.mask("avx2")
    assert environment["XLA_FLAGS"] == "--xla_dump_to=/tmp/nowhere --xla_cpu_max_isa=AVX2"
    assert environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_onednn_is_left_to_tensorflow(monkeypatch):
    monkeypatch.setenv(instruction_sets.ONEDNN, "1")
    instruction_sets.set_onednn(None)
    assert instruction_sets.ONEDNN not in os.environ
    instruction_sets.set_onednn("0")
    assert os.environ[instruction_sets.ONEDNN] == "0"


def test_gpus_are_refused_in_one_line_where_there_is_none(monkeypatch, capsys):
    monkeypatch.setattr(throughput, "found_gpus", lambda: 0)
    with pytest.raises(SystemExit):
        throughput.chosen(["--devices", "GPU"])
    assert capsys.readouterr().err.splitlines()[-1].endswith("--devices GPU needs a GPU, and TensorFlow finds none")


def test_importing_the_sides_does_not_start_tensorflow():
    code = "import sys, benchmarks.throughput; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_option_is_given_twice():
    _, options = throughput.chosen(["--jit-compile", "true", "--jit-compile", "true", "--brief"])
    assert options.jit_compile == ("true",)
    assert not options.with_torch


@pytest.mark.parametrize("name", COMPARED)
def test_twins_have_as_many_weights(name):
    pytest.importorskip("torch")
    from benchmarks.torch_networks import blocks

    theirs = sum(each.numel() for block in blocks(COMPARED[name]) for each in block.parameters())
    ours = sum(each.shape.num_elements() for each in build(COMPARED[name]).trainable_variables)
    second_biases = 4 * 256 * 4 if name == "residual_lstm" else 0  # PyTorch's LSTMs have two
    assert theirs == ours + second_biases
