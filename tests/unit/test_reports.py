"""Reports of other machines are read as the benchmark writes them, and name no host."""

import json
import platform
import re

from moe_lib import reports as module
from moe_lib.paths import DATA
from moe_lib.reports import reports

REPORT = {
    "date": "2026-01-02",
    "hardware": {"cpu": "A CPU", "cores": 2, "memory_gb": 24, "torch": "2.13.0"},
    "load": 0.1,
    "runs": [
        {
            "precision": "int4",
            "experts": 384,
            "tokens": [1, 512],
            "results": {
                "moe_lib": {"error": 0.004, "read": 3e10, "rate": 4e11, "seconds": {"1": 0.0123, "512": 1.5}},
                "kt-kernel": {},
            },
        }
    ],
}


def test_a_report_is_read(tmp_path, monkeypatch):
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "2026-01-02-cpu.json").write_text(json.dumps(REPORT))
    gpu = REPORT | {"hardware": REPORT["hardware"] | {"gpu": "H200", "gpus": 2}}
    (tmp_path / "measured" / "2026-01-03-cuda.json").write_text(json.dumps(gpu))
    (tmp_path / "measured" / "training.json").write_text("{}")
    monkeypatch.setattr(module, "DATA", tmp_path)
    found = reports()
    assert len(found) == 4 and [r.gpu for r in found] == [False, False, True, True]
    assert str(found[0]) == "| A CPU, 2 cores | 2026-01-02 | int4 | 384 | 1 | 12.3 |"
    assert str(found[3]).startswith("| 2 × H200 |")


def test_no_reports_are_an_empty_list(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "DATA", tmp_path)
    assert reports() == []


def test_committed_reports_are_whole_and_name_no_host():
    for path in (DATA / "measured").glob("*-cpu.json"):
        text = path.read_text()
        told = json.loads(text)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", told["date"]) and {"cpu", "cores", "memory_gb"} <= set(told["hardware"])
        assert platform.node() not in text or not platform.node()
        for run in told["runs"]:
            for name, result in run["results"].items():
                assert "failed" in result or result["error"] < 0.02, name
    assert all(r.seconds > 0 for r in reports())
