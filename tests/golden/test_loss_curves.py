"""Recorded loss curves repeat; tools/make_golden.py records them anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import make_golden

pytestmark = pytest.mark.golden


@pytest.mark.parametrize("name", make_golden.MODELS)
def test_a_recorded_curve_repeats(name: str, tmp_path: Path) -> None:
    recorded = json.loads((make_golden.CURVES / f"{name}.json").read_text(encoding="utf-8"))
    assert recorded["flags"] == make_golden.MODELS[name]
    found = make_golden.compute(name, tmp_path)
    assert found["lm_loss"] == pytest.approx(recorded["lm_loss"], abs=1e-5)
    assert found["grad_norm"] == pytest.approx(recorded["grad_norm"], rel=1e-4)
    assert found["lm_loss"][-1] < found["lm_loss"][0] - 0.3
