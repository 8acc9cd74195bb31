"""What the planner is told (models, clusters) and says of its constants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_dry_run import CASES
from smp_core.planner.fitted import FITTED
from smp_core.planner.hardware import Hardware
from smp_core.planner.trace import trace_model
from tests.harness import ROOT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama-3.1-8c", "did you mean 'llama-3.1-8b'"),
        ("tests.core.planner.planner_models:nothing", "write package.module:function"),
        ("tests.core.planner.planner_models:without_batch", r"return \(model, batch\)"),
        ("tests.core.planner.planner_models:without_blocks", "nn.ModuleList"),
    ],
)
def test_a_model_that_cannot_be_traced_says_what_to_write(words: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trace_model(words, 16)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("4x8:a100-40q@400gbps", "did you mean 'a100-40g'"),
        ("4x8:h200", "how fast are the nodes connected"),
        ("4x8:h200@fast", "Gbit/s of a node"),
        ("4xp7", "unknown kind of node"),
        ("32 nodes", "NODESxDEVICES:DEVICE@RATE"),
        ("0x8:h200", "at least 1"),
        ("nowhere.yaml", "cannot read"),
    ],
)
def test_a_cluster_that_is_not_understood_says_how_one_is_written(cluster: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Hardware.parse(cluster)


def test_a_cluster_file_has_what_the_tables_lack(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: 4xp5\nprice_per_node_hour: 98\n", encoding="utf-8")
    assert Hardware.parse(path) == replace(Hardware.parse("4xp5"), price=98.0)
    device = "{name: New, memory_gib: 64, bf16_tflops: 500, hbm_gb_per_s: 2000, link_gb_per_s: 100}"
    path.write_text(f"nodes: 2\ndevices_per_node: 4\ngbit_per_s: 800\ndevice: {device}\n", encoding="utf-8")
    assert (Hardware.parse(path).devices, Hardware.parse(path).device.flops) == (8, 500e12)
    path.write_text("cluster: 4xp5\nprice: 98\n", encoding="utf-8")
    with pytest.raises(ValueError, match="price_per_node_hour"):
        Hardware.parse(path)


def test_constants_and_the_page_are_those_of_the_result() -> None:
    """The fits are `benchmarks/planner.py`'s; what is judged is one size that the others were fitted without."""
    result = json.loads(Path(ROOT, "benchmarks", "results", "planner.json").read_text(encoding="utf-8"))
    foundry, kempner = (result[name]["fitted_on_all"] for name in ("llm_foundry", "kempner"))
    for kind, own in (("products", FITTED.products), ("attention", FITTED.attention)):
        assert own == {"A100": round(foundry[f"{kind}_A100"], 3), "": round(foundry[f"{kind}_H100"], 3)}
    assert (FITTED.link, FITTED.exposed) == (round(foundry["link"], 3), round(foundry["exposed"], 3))
    assert FITTED.network == round(kempner["network"], 3)
    text = Path(ROOT, "docs", "planning.md").read_text(encoding="utf-8")
    for name in ("llm_foundry", "kempner", "vtrain"):
        judged, rows = result[name]["held_out_by_size"], result[name]["rows"]
        errors = [abs(row["held_out_error"]) for row in rows]
        assert sum(errors) / len(errors) == pytest.approx(result[name]["held_out_mape"])
        worst = max(judged, key=lambda size: judged[size]["mape"])
        assert f"| {len(rows)} | {result[name]['held_out_mape']:.1%} | {judged[worst]['mape']:.1%} ({worst}) |" in text
    assert f"| {result['lab_by_scaling_model']['mape']:.1%} |" in text
    lab = json.loads(Path(ROOT, "benchmarks", "results", "planner_lab.json").read_text(encoding="utf-8"))
    assert all(f"{lab['mape'][file]:.1%}" in text for file in ("cluster", "cluster-tensor"))
    assert f"{lab['mape_of_stages']:.1%} with stages" in text
    for row in lab["rows"]:
        names = (row["measured_pick"].removeprefix("ours-"), row["best"].removeprefix("ours-"))
        assert f"| {names[0]} | {names[1]} | {row['slower_than_best']:.1%} |" in text
    memory = result["kempner_memory"]
    assert f"{memory['mape']:.1%} off on average, and {abs(memory['worst']):.1%} at the most" in text
    runs = json.loads(Path(ROOT, "benchmarks", "results", "planner_dry_run.json").read_text(encoding="utf-8"))
    for name, run in runs.items():
        total = sum(run["counted"].values()) / 2**30
        worst = max((off for off in run["off"].values() if off is not None), key=abs)
        assert f"| {name} | {run['ranks']} | {total:.1f} | {run['off_in_all']:+.1%} | {worst:+.1%} |" in text
    assert all(run["sent_is_equal"] for run in runs.values()) and list(runs) == list(CASES)
