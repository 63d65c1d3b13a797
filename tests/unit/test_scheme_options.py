"""Schemes as objects that own their options, and what these come to."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipetrain
from pipetrain.plan.memory import Training
from pipetrain.schemes.grid import Grid
from pipetrain.schemes.options import (
    OPTIONS,
    AsynchronousOptions,
    check_owned,
    compressing,
    each_compressing,
    flat,
    name_of,
    options_of,
    owners,
    policy_of,
    scheduled,
    with_options,
    written,
)
from pipetrain.schemes.table import AUTO, EVERY_NAME, scheme

VALUES = {
    "horizon": {"spectrain": "target", "2bw": 1.5},
    "spike_compensation": True,
    "rescale_steps": 20,
    "stretch_momentum": False,
    "chunks": 3,
    "order": "tic",
    "compression": "int8:64",
    "replica_compression": "top-k:0.1",
    "synchrony": "stale:1",
    "topology": "gossip:torus",
    "servers": 2,
    "children": 4,
    "depth": 2,
    "stragglers": 1,
    "staleness": "predicted",
    "allow": "compression,local",
}


def value(name, option):
    found = VALUES[option]
    return found[name] if isinstance(found, dict) else found


@pytest.mark.parametrize("name", OPTIONS)
def test_keywords_and_objects_are_the_same(name):
    """What is given by keyword is the object's field; what the object tells is what it was made of."""
    for option in (each.name for each in fields(OPTIONS[name])):
        given_ = {option: value(name, option)}
        if name == "coded-reduce":
            given_ = {"children": 4, **given_}
        made = OPTIONS[name](**given_)
        assert with_options(name, **given_) == made
        assert name in owners(option)
        told = flat(made, microbatches=2)
        assert told.pop("microbatches") == 2
        assert with_options(told.pop("scheme"), **told) == made
        assert eval(f"pipetrain.{made!r}") == made and str(made) == name
        with pytest.raises(FrozenInstanceError):
            setattr(made, option, None)


@pytest.mark.parametrize("name", [*EVERY_NAME, AUTO])
@pytest.mark.parametrize("option", [*VALUES, "grid"])
def test_an_option_that_a_scheme_does_not_have_is_refused_by_both_names(name, option):
    if name in owners(option):
        return
    wanted = (2, 1) if option == "grid" else value("spectrain", option)
    if (name, option) in (("2bw", "horizon"), ("spike-compensation", "spike_compensation")):
        return
    if option == "stretch_momentum" and name != AUTO:
        assert with_options(name, stretch_momentum=False) == name  # whose momentum is never stretched
        wanted = True
    with pytest.raises((ValueError, TypeError), match=rf"Received: .*{option}.*Try "):
        with_options(name, **{option: wanted})


def test_what_policies_and_plans_take_of_them():
    ahead = pipetrain.SpecTrain(horizon="target", stretch_momentum=False)
    assert policy_of(ahead)["horizon"] == "target" and scheduled(ahead) == "spectrain"
    assert Training().under(ahead).chosen == scheme("spectrain", "target", stretch_momentum=False)
    assert Training().under(pipetrain.TwoBW(horizon=2)).chosen == scheme("2bw", 2.0)
    assert Training().under(pipetrain.TwoBW()).chosen == scheme("2bw")
    assert scheduled(pipetrain.Interleaved(chunks=3)).schedule.chunks == 3
    assert pipetrain.CodedReduce(3).tree.workers == 3
    assert name_of(Grid(2, 1)) == "grid" and flat(Grid(2, 1)) == {"scheme": "grid", "grid": (2, 1)}


def test_the_automatic_grid_is_the_name_alone():
    assert with_options("grid", grid="auto") == "grid" and with_options("grid", grid=(2, 1)) == Grid(2, 1)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: pipetrain.SpecTrain(horizon="far"), "Unknown horizon. Received: horizon='far'"),
        (lambda: pipetrain.SpecTrain(stretch_momentum=True), "Try scheme='spectrain', horizon='target'"),
        (lambda: pipetrain.TwoBW(horizon=-1), "2bw predicts a number of updates ahead"),
        (lambda: pipetrain.Vanilla(rescale_steps=0), "Received: rescale_steps=0. Try rescale_steps=1000"),
        (lambda: pipetrain.Interleaved(chunks=0), "Received: chunks=0. Try chunks=2"),
        (lambda: pipetrain.AllReduce(order="push-pull"), "Received: order='push-pull', scheme='all-reduce'"),
        (lambda: pipetrain.ParameterServer(servers=0), "Received: servers=0. Try servers=1"),
        (lambda: pipetrain.CodedReduce(2, stragglers=2), "Received: children=2, depth=1, stragglers=2"),
        (lambda: pipetrain.TopK(warm_up=-1), "Received: warm_up=-1. Try warm_up=100"),
        (lambda: pipetrain.TopK(local_clipnorm=0), "Received: local_clipnorm=0. Try 1.0, or None"),
        (
            lambda: pipetrain.OneFOneB(replica_compression=pipetrain.TopK(warm_up=9)),
            "What a stage's replicas send is alike in all steps",
        ),
        (lambda: pipetrain.Auto(staleness="some"), "Received: staleness='some'. Try one of: none, predicted"),
        (lambda: options_of("coded-reduce"), "needs to know how many children"),
        (
            lambda: with_options(pipetrain.SpecTrain(), horizon="local"),
            r"Try scheme=pipetrain.SpecTrain\(horizon='local'\)",
        ),
        (lambda: name_of(Grid(0, 1)), "A grid's sides are counts"),
    ],
)
def test_values_that_cannot_be_are_refused_when_the_object_is_made(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


@given(st.sampled_from([*OPTIONS]), st.sampled_from([*EVERY_NAME]))
def test_of_several_schemes_one_must_have_the_option(name, other):
    for option in (each.name for each in fields(OPTIONS[name]) if each.name != "horizon"):
        check_owned({option: value(name, option)}, other, name)


@pytest.mark.parametrize(
    ("values", "schemes"),
    [
        ({"synchrony": "local:8"}, ("parameter-server", "all-reduce")),
        ({"synchrony": "asynchronous"}, ("all-reduce", "parameter-server")),
        ({"compression": "top-k"}, ("1f1b", "all-reduce", "gpipe")),
        ({"order": "caramel"}, ("parameter-server", "all-reduce")),
    ],
)
def test_a_value_is_taken_if_one_of_the_schemes_takes_it_in_whatever_order_they_are(values, schemes):
    for order in itertools.permutations(schemes):
        check_owned(values, *order)
        with pytest.raises(ValueError, match="Received: "):
            check_owned({name: "nothing:such" for name in values}, *order)


class Halved(pipetrain.Compression):
    def __init__(self, divisor):
        self.divisor = divisor

    def encode(self, values):
        return [values]


class Whole(Halved):
    def decode(self, parts):
        return parts[0]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: pipetrain.AllReduce(compression=pipetrain.Compression()), "without encode and decode. Try one of"),
        (lambda: pipetrain.ParameterServer(compression=Halved(2)), "without decode. Try one of: 'bfloat16'"),
        (lambda: pipetrain.OneFOneB(replica_compression=Halved(2)), "Received: replica_compression=.*without decode"),
        (lambda: pipetrain.Auto(allow=3), "Received: allow=3. Try some of"),
    ],
)
def test_objects_that_cannot_serve_are_refused_when_the_scheme_is_made(make, problem):
    with pytest.raises(TypeError, match=problem):
        make()


def test_a_compression_of_ones_own_is_told_by_what_it_holds():
    """A run that goes on is compared by this text, which is the same in another process."""
    assert pipetrain.AllReduce(compression=Whole(3)).compression.divisor == 3
    assert str(Whole(3)) == "Whole(divisor=3)" != str(Whole(4))


def test_what_numpy_says_is_true_and_what_is_none_by_name_are_taken_as_such():
    assert pipetrain.TopK(momentum_correction=np.True_).momentum_correction is True
    with pytest.raises(ValueError, match="Received: compression"):
        pipetrain.TopK(momentum_correction=np.True_).corrected(0.0)
    for none in ("none", "none:"):
        pipetrain.AllReduce(topology="ring", compression=none)
        pipetrain.ParameterServer(synchrony="asynchronous", compression=none)


def test_every_option_of_an_asynchronous_scheme_reaches_its_policy():
    """One that does not is silently left out when the model trains."""
    for kind in (each for each in OPTIONS.values() if issubclass(each, AsynchronousOptions)):
        for each in fields(kind):
            wanted = value(kind.name, each.name)
            others = {"horizon": "target"} if each.name == "stretch_momentum" else {}
            made, plain = policy_of(kind(**{**others, each.name: wanted})), policy_of(kind(**others))
            assert each.name in made and made != plain
            assert kind(**{**others, each.name: wanted}).scheme != kind(**others).scheme


def test_schemes_are_told_as_a_program_would_write_them():
    given = pipetrain.AllReduce(compression=pipetrain.TopK(0.1), synchrony=pipetrain.LocalSGD(4))
    assert written(given).startswith("pipetrain.AllReduce(compression=pipetrain.TopK(share=0.1")
    assert "synchrony=pipetrain.LocalSGD(steps=4" in written(given)
    assert flat(pipetrain.OneFOneB(compression=pipetrain.Int8(64))) == {"scheme": "1f1b", "compression": "int8:64"}


def test_more_is_sent_in_the_quarters_of_a_warm_up():
    """As Deep Gradient Compression has it: 25%, 6.25%, 1.6%, 0.4%, 0.1% of the elements."""
    warm = pipetrain.TopK(share=0.001, warm_up=100)
    assert [warm.phase(updates) for updates in (0, 24, 25, 99, 100, 10**9)] == [0, 0, 1, 3, 4, 4]
    shares = [warm.in_phase(phase).share for phase in range(5)]
    assert shares == pytest.approx([0.25, 0.0629, 0.0158, 0.0040, 0.001], rel=0.01)
    plain = pipetrain.TopK(share=0.5)
    assert plain.in_phase(plain.phase(0)) == plain
    assert pipetrain.TopK(share=0.5, warm_up=8).in_phase(0).share == 0.5  # never less than asked


def test_a_compression_is_told_with_all_that_is_not_the_default():
    assert [str(each) for each in (pipetrain.TopK(), pipetrain.TopK(0.1), pipetrain.Int8(64))] == [
        "top-k",
        "top-k:0.1",
        "int8:64",
    ]
    for text in ("sign", "sign:majority"):
        assert policy_of(pipetrain.OneFOneB(replica_compression=text))["replica_compression"] == text
        assert policy_of(pipetrain.AllReduce(compression=text))["compression"] == text
    assert pipetrain.Sign(majority=True).sent_bytes((3, 5)) == 3  # 15 bits, and two for all of them
    told = str(pipetrain.TopK(0.1, warm_up=100, error_feedback=False))
    assert told == "top-k:0.1, error_feedback=False, warm_up=100"


def test_local_steps_are_told_with_all_that_is_not_the_default():
    made = pipetrain.LocalSGD(8), pipetrain.LocalSGD(8, fragments=4), pipetrain.LocalSGD(8, 0.7, 0.9, 4)
    assert [*map(str, made)] == ["local:8", "local:8, fragments 4", "local:8, rate 0.7, momentum 0.9, fragments 4"]
    assert str(pipetrain.LocalSGD(8, overlap=True)) == "local:8, overlap, mixing 0.5"


def test_no_compression_is_one_value():
    assert pipetrain.OneFOneB(compression="none", replica_compression="none") == pipetrain.OneFOneB()
    assert pipetrain.AllReduce(compression="none") == pipetrain.AllReduce()
    assert pipetrain.AllReduce(compression="none", topology="ring").compression is None
    assert with_options("1f1b", compression="none") == "1f1b" and with_options("single", compression="none") == "single"


class Own(pipetrain.Compression):
    def encode(self, values):
        return [values]

    def decode(self, parts):
        return parts[0]


class Kept(Own):
    error_feedback = True


def test_where_others_send_gradients_cuts_have_none_that_is_for_these_alone():
    def of_cuts(compression, *others):
        *_, way = each_compressing([*others, "1f1b"], compression)
        return None if way == "1f1b" else way.compression

    for only_for_gradients in (Kept(), pipetrain.Int8(error_feedback=True)):
        assert of_cuts(only_for_gradients, "all-reduce") is None
        with pytest.raises(ValueError, match="Try error_feedback=False"):
            of_cuts(only_for_gradients)
        with pytest.raises(ValueError, match="Try error_feedback=False"):
            each_compressing(["all-reduce", pipetrain.OneFOneB(compression=only_for_gradients)], "int8")
    assert of_cuts("top-k", "all-reduce") is of_cuts(None, "all-reduce") is None
    own = Own()
    assert of_cuts(own, "all-reduce") is of_cuts(own) is own
    assert of_cuts("int4", "parameter-server") == "int4"


def test_sums_of_a_scheme_of_ones_own_are_compressed():
    own = with_options(scheme("1f1b")._replace(name="own"), replica_compression="int8")
    assert own.compresses and own.compression is None and str(own.replica_compression) == "int8"
    assert compressing(own, compression="int4").compression is not None
    with pytest.raises(ValueError, match=r"no replicas.*replica_compression=Int8"):
        own._replace(schedule=scheme("interleaved").schedule).check()
