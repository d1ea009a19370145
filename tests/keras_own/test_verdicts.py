"""How two runs of Keras's tests are compared."""

import numpy as np
import pytest
import verdicts


def notes(*calls, outcome="passed", message="", spread=1, refused=()):
    return {
        "outcome": outcome,
        "message": message,
        "calls": list(calls),
        "spread": spread,
        "refused": list(refused),
    }


def fitted(*losses):
    return "fit", [("loss", np.array(losses))]


PLAIN = notes(fitted(1.0, 0.5), spread=0)


@pytest.mark.parametrize(
    "plain, spread, kind, detail",
    [
        (PLAIN, notes(fitted(1.0, 0.5 + 1e-7)), verdicts.PASSED, ""),
        (PLAIN, notes(fitted(1.0, 0.5), spread=0), verdicts.NO_MODEL, ""),
        (PLAIN, notes(fitted(1.0, 0.51)), verdicts.NUMBERS, "differs by 1.0e-02"),
        (PLAIN, notes(fitted(1.0, np.nan)), verdicts.NUMBERS, "nan"),
        (PLAIN, notes(fitted(1.0)), verdicts.NUMBERS, "shape"),
        (PLAIN, notes(), verdicts.NUMBERS, "calls []"),
        (PLAIN, notes(outcome="failed", message="ValueError: no"), verdicts.FAILED, "no"),
        (PLAIN, notes(outcome="failed", refused=["ragged"]), verdicts.REFUSED, "ragged"),
        # What ran before the refusal was wrong.
        (
            notes(fitted(1.0), fitted(0.5), spread=0),
            notes(fitted(2.0), ("fit", "UnsupportedError"), outcome="failed", refused=["ragged"]),
            verdicts.NUMBERS,
            "differs",
        ),
        (notes(outcome="failed", message="no grain"), notes(), verdicts.PLAIN, "no grain"),
        (notes(outcome="skipped"), notes(outcome="skipped"), verdicts.SKIPPED, ""),
    ],
)
def test_verdict(plain, spread, kind, detail):
    (verdict,) = verdicts.judge(
        {"keras/src/a_test.py::a": plain}, {"keras/src/a_test.py::a": spread}
    )
    assert (verdict.test, verdict.kind) == ("a_test.py::a", kind)
    assert detail in verdict.detail


def test_an_error_with_another_text_is_another_result():
    plain, spread = notes(("fit", "ValueError: a")), notes(("fit", "ValueError: b"))
    (verdict,) = verdicts.judge({"a": plain}, {"a": spread})
    assert verdict.kind == verdicts.NUMBERS


def test_what_is_known_is_not_new():
    known = verdicts.Known(("a_test.py::A::*",), verdicts.FAILED, "why", strategies=("data",))
    explained = verdicts.Verdict("a_test.py::A::one", verdicts.FAILED)
    new = verdicts.Verdict("a_test.py::A::one", verdicts.NUMBERS)
    passed = verdicts.Verdict("a_test.py::A::two", verdicts.PASSED)
    found = verdicts.split([explained, new, passed], [known])
    assert found == ([(explained, known)], [new])
    assert known.applies("data", "torch") and not known.applies("model", "torch")
