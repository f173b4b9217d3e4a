"""What the CUDA allocator had given out, in every view, on ledgers written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import accumviz as av
from accumviz.ledger.ledger import Ledger, Parameter
from accumviz.views.timeline import timeline

KIB = 1024.0
W = Parameter("w", (1,), device="cuda:0", optimizers=(0,))


def rows(*figures: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"kind": "backward", "contribution": {"w": 1}, "grad": {"w": n + 1}, "allocated": allocated, "peak": peak}
        for n, (allocated, peak) in enumerate(figures)
    ]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger.build([W], rows((2 * KIB, 8 * KIB), (2 * KIB, np.nan), (np.nan, np.nan)))


def test_a_timeline_says_them_only_where_they_were_measured(ledger: Ledger) -> None:
    said = timeline(ledger).words
    assert said[1].endswith("2 KiB allocated, 8 KiB at most on the way.")
    assert said[2].endswith("2 KiB allocated.")
    assert "allocated" not in said[3]


def test_they_survive_a_file_and_stay_unknown_where_they_are(ledger: Ledger, tmp_path: Path) -> None:
    ledger.save(tmp_path / "with.ledger")
    back = av.load(tmp_path / "with.ledger")
    np.testing.assert_array_equal([[e.allocated, e.peak] for e in back], [[e.allocated, e.peak] for e in ledger])
    plain = Ledger.build([W], [{"kind": "backward", "contribution": {"w": 1}, "grad": {"w": 1}}])
    plain.save(tmp_path / "without.ledger")
    assert np.isnan(av.load(tmp_path / "without.ledger")[0].allocated)


def test_bytes_are_not_known_where_ranks_are_one_event() -> None:
    def rank(number: int) -> Ledger:
        sync = {"kind": "sync", "details": {"op": "all-reduce", "bytes": 4}, "allocated": KIB, "peak": 4 * KIB}
        return Ledger.build([W], [*rows((2 * KIB, 3 * KIB)), sync], meta={"rank": number})

    merged = Ledger.merge([rank(0), rank(1)])
    assert [(e.kind, e.rank, e.peak) for e in merged][:2] == [("backward", 0, 3 * KIB), ("backward", 1, 3 * KIB)]
    assert np.isnan([merged[2].allocated, merged[2].peak]).all()
