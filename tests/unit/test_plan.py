"""The table of a plan, its sums, its picture and its device strings."""

import sys

import pytest

from parallel_keras.plan import LayerCost, Plan, human_bytes, human_number, parse_devices

COSTS = [
    LayerCost("model/a", "Dense", 4096, 4096, 8192, 1024, 2_000_000, (8, 32)),
    LayerCost("model/b", "ReLU", 0, 0, 0, 1024, 256, (8, 32)),
    LayerCost("model/<c>", "Dense", 1024, 1024, 2048, 512, 1000, ((8, 4), (8, 2))),
]


def plan(**kwargs):
    return Plan(COSTS, [0, 0, 1], ["gpu:0", "gpu:1"], **kwargs)


def test_totals_and_imbalance():
    first, second = plan().totals
    assert first["device"] == "gpu:0" and first["layers"] == 2
    assert (first["parameters"], first["activations"], first["bytes"]) == (4096, 2048, 18432)
    assert second["bytes"] == 4608 and second["flops"] == 1000
    assert first["share"] + second["share"] == pytest.approx(1)
    assert plan().imbalance == pytest.approx(18432 / 11520)
    for part in ("parameters", "gradients", "slots", "activations", "bytes", "flops"):
        assert sum(t[part] for t in plan().totals) == sum(getattr(c, part) for c in COSTS)


def test_the_table():
    text = str(plan(title="PipelineParallel(devices=2)"))
    lines = text.splitlines()
    assert lines[0] == "PipelineParallel(devices=2)"
    assert "8×32" in text and "8×4, 8×2" in text and "2.00 M" in text and "80.0 %" in text
    assert lines[-1] == "Imbalance (largest device / mean): 1.60"
    assert "capacity" not in text and "Warning" not in text
    assert len({len(line) for line in lines[1:6]}) == 1  # the columns line up


def test_a_device_that_is_too_small():
    small = plan(capacity=10_000)
    assert [t["over"] for t in small.totals] == [8432, 0]
    assert str(small).splitlines()[-1] == (
        "Warning: gpu:0 holds 9.77 KiB, but 18.0 KiB are placed on it: 8.23 KiB too many."
    )
    assert "<b>Warning:</b> gpu:0" in small._repr_html_()
    assert plan(capacity=[None, 1]).warnings[0].startswith("gpu:1")


def test_html_is_escaped():
    page = plan(title="<Plan>")._repr_html_()
    assert "&lt;Plan&gt;" in page and "model/&lt;c&gt;" in page and "<c>" not in page


def test_an_empty_device_and_an_empty_plan():
    assert Plan(COSTS, [0, 0, 0], ["a", "b"]).imbalance == 2.0
    empty = Plan([], [], ["cpu:0"])
    assert empty.imbalance == 1.0 and "cpu:0" in str(empty)


@pytest.mark.parametrize(
    "placement, devices, capacity",
    [([0, 1], ["a", "b"], None), ([0, 1, 2], ["a", "b"], None), ([0, 0, -1], ["a"], None)]
    + [([0, 0, 0], [], None), ([0, 0, 0], ["a"], [1, 2])],
)
def test_lists_that_do_not_fit(placement, devices, capacity):
    with pytest.raises(ValueError, match="Received: "):
        Plan(COSTS, placement, devices, capacity)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture(tmp_path, ending):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{ending}"
    plan(capacity=10_000).save(path)
    assert path.stat().st_size > 5000


def test_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        plan().save(tmp_path / "plan.png")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4x80GB", (4, 80 * 10**9)),
        ("2 x 40 GiB", (2, 40 * 2**30)),
        ("1X1.5tb", (1, 1500 * 10**9)),
        ("8", (8, None)),
    ],
)
def test_device_strings(text, expected):
    names, capacity = parse_devices(text)
    assert (len(names), capacity) == expected
    assert names == [f"gpu:{index}" for index in range(expected[0])]


def test_device_strings_with_a_kind():
    assert parse_devices("cpu:2x16GB") == (["cpu:0", "cpu:1"], 16 * 10**9)


@pytest.mark.parametrize("text", ["", "x", "0x80GB", "-1", "4x", "4x80", "4x80 apples", None])
def test_device_strings_that_are_none(text):
    with pytest.raises(ValueError, match="such as '4x80GB'. Received: "):
        parse_devices(text)


def test_human_units_never_print_four_digits_of_the_next_unit():
    assert [human_bytes(n) for n in (1, 1024, 1023.7 * 1024)] == ["1 B", "1.00 KiB", "1.00 MiB"]
    assert [human_number(n) for n in (0, 999, 999_600)] == ["0", "999", "1.00 M"]
