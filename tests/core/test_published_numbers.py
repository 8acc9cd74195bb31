"""README.md, docs/ and benchmarks/ have the numbers of the results that are committed
under benchmarks/results/."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from smp_core.cluster.links import PLACES, Links
from tests.harness import ROOT

RESULTS = Path(ROOT, "benchmarks", "results")


def page(name: str) -> str:
    return Path(ROOT, name).read_text(encoding="utf-8")


def result(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def mib(n_bytes: float) -> float:
    return n_bytes / 2**20


def test_the_cluster_tables_are_those_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(ROOT, "benchmarks", "cluster")
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location("cluster_bench", folder / "bench.py")
    assert spec is not None and spec.loader is not None
    bench: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cluster_bench", bench)
    spec.loader.exec_module(bench)
    tables: Any = importlib.import_module("tables")
    found = result("cluster")
    rows, report = found["rows"], "run benchmarks/cluster/bench.py --report"
    machine = found["machine"]
    made = {
        "docs/performance.md": tables.page(machine, rows),
        "README.md": tables.headline(machine, rows),
    }
    for name, text in made.items():
        shown = page(name).split(bench.BEGIN, 1)[1].split(bench.END, 1)[0]
        assert shown.strip() == text.strip(), f"{name}: {report}"
    every_row = tables.every_row(rows, found["scaling"])
    assert page("benchmarks/results/cluster.md") == every_row, (
        f"benchmarks/results/cluster.md: {report}"
    )
    lines = [
        line.split(" | ")[1:]
        for line in tables.ratios(rows).rstrip(" |").splitlines()[2:]
    ]
    for column in zip(*lines, strict=True):
        ratios = [
            float(cell.rstrip(" |")) for cell in column if cell.rstrip(" |") != "-"
        ]
        assert f"| {min(ratios):.2f} to {max(ratios):.2f} |" in page(
            "docs/performance.md"
        )


def test_the_lab_row_of_tensor_ranks_is_that_of_the_result() -> None:
    text = page("docs/tensor-tokens.md")
    names = {
        "HSDP, two-hop": "hsdp-two-hop",
        '`shard_degree="node"`': "ours-node",
        "tensor 2, replicas between nodes": "ours-tensor",
        "tensor 2, shards between nodes": "ours-tensor-world",
    }
    rows = result("cluster-tensor")["rows"]
    assert f"other programs, {max(row['busy_before'] for row in rows):.0f} %" in text
    for row in rows:
        for shown, name in names.items():
            found = row["schemes"][name]
            seconds, sent = (
                statistics.median(found["seconds"]),
                statistics.fmean(found["node_bytes"]) / 1e6,
            )
            line = f"| {row['micro']} | {shown} | {seconds:.2f} | {sent:.1f} | {found['lower_bound'] / 1e6:.1f} |"
            assert line in text and found["losses_agree"], line


def test_the_bubble_is_that_of_the_result() -> None:
    found, text = result("pipeline_bubble"), page("docs/pipeline-parallelism.md")
    for row in found["results"]:
        measured = ", ".join(f"{share:.3f}" for share in row["measured"])
        case = f'{row["stages"]} | {row["micro_batches"]} | `"{row["schedule"]}"`'
        line = f"| {case} | {row['expected']:.3f} | {measured} |"
        assert line in text and row["off"] <= found["goal"] == 0.1
    assert (
        f"at most {100 * max(row['off'] for row in found['results']):.1f} % off the formula"
        in text
    )


def test_the_lab_rows_of_pipeline_stages_are_those_of_the_result() -> None:
    text, found = page("docs/pipeline-parallelism.md"), result("cluster-pipeline")
    names = {
        "HSDP, two-hop": "hsdp-two-hop",
        "world": "ours-world",
        "node": "ours-node",
        "node, once": "ours-node-once",
    }
    names |= {"stages": "ours-pipeline", "stages, replicas": "ours-pipeline-replicas"}
    assert (
        f"other programs, {max(row['busy_before'] for row in found['rows']):.0f} %"
        in text
    )
    for row in found["rows"]:
        schemes = row["schemes"]
        assert all(
            schemes[name]["losses_agree"] for name in names.values() if name in schemes
        )
        cells = [
            f"{statistics.median(schemes[name]['seconds']):.2f}"
            if name in schemes
            else "-"
            for name in names.values()
        ]
        stages = schemes["ours-pipeline"]
        sent, bound = (
            statistics.fmean(stages["node_bytes"]) / 1e6,
            stages["lower_bound"] / 1e6,
        )
        line = f"| {row['layout']} | {row['rate']} | {row['micro']} | {' | '.join(cells)} | {sent:.2f} | {bound:.2f} |"
        assert line in text, line


def test_memory_modes_are_those_of_the_result() -> None:
    modes, text = result("memory")["modes"], page("docs/memory.md")
    for mode, found in modes.items():
        held = f"{mib(found['held_between_forward_and_backward']):.2f}"
        optimizer = f"{mib(found['peak']['optimizer']):.1f}".replace("0.0", "0")
        on_host = mib(sum(found["host"].values()))
        name, _, horizon = mode.partition(" + offload, horizon ")
        name = name if name == "none" or "=" in name else f'"{name}"'
        shown = (
            f'`"full"`, offloading, horizon {horizon}'
            if horizon
            else f"`{name}`"
            if name != "none"
            else name
        )
        row = f"| {shown} | {held} | {optimizer} | {f'{on_host:.1f} ' if on_host else ''}|"
        assert row in text, row
    shares = [
        found["watched_processor_seconds"] / found["processor_seconds"] - 1
        for found in modes.values()
    ]
    assert f"(none to {max(shares):.1%} by mode".replace("%", " %") in page(
        "docs/memory-reports.md"
    )


def test_the_memory_tier_is_that_of_the_result() -> None:
    found, text = result("memory_tier"), page("docs/checkpoints-in-memory.md")
    for cost in found["cost"]:
        row = (
            f"| {cost['shard_degree']} | {cost['compute_s']:.0f} s | {cost['step_ms']:.0f} ms | "
            f"{cost['step_link_ms']:.0f} ms | {cost['state_link_ms']:.0f} ms | "
            f"{cost['state_ms']:.0f} ± {cost['uncertainty_ms']:.0f} ms | {cost['share_of_a_step']:.1%} | "
            f"{cost['share_every_10_steps']:.2%} |"
        )
        assert row.replace("%", " %") in text, row
    for lost in found["lost"]:
        assert f"{lost['next_step_s']:.1f} s" in text
        assert (
            lost["bit_equal"]
            and not lost["survivors_opened_on_disk"]
            and not lost["left_in_memory"]
        )


def test_link_fits_are_those_of_the_results() -> None:
    text = page("docs/measured-links.md")
    for name in ("links-2x2", "links-2x4"):
        found = Links.load(RESULTS / f"{name}.json")
        for place in ("inter", "flat"):
            collectives = getattr(found, place)
            for kind in ("all_gather", "reduce_scatter", "all_reduce"):
                fit = getattr(collectives, kind)
                rate = fit.bandwidth / 1e6
                node = f"{rate * found.ranks_per_node:.1f}" if place == "inter" else ""
                row = (
                    f"| {found.nodes} x {found.ranks_per_node} | {PLACES[place]} | `{kind}` | "
                    f"{fit.latency * 1e3:.2f} | {rate:.1f} | {node} | {fit.error:.0%} |"
                )
                assert row in text, row


def test_overhead_is_that_of_the_result() -> None:
    text = page("docs/lightning-runs.md")
    for found in result("overhead")["results"].values():
        assert found["ratio"] == statistics.median(found["ratios"])
        shown = f"| {found['ratio']:.2f} ({', '.join(f'{ratio:.2f}' for ratio in found['ratios'])}) |"
        assert shown in text, shown


def test_fp8_parity_is_that_of_the_result() -> None:
    text = page("docs/fp8.md")
    for found in result("fp8_parity")["results"].values():
        bfloat16, fp8 = (
            f"{statistics.mean(found[kind]):.4f}" for kind in ("bfloat16", "fp8")
        )
        share, off = (
            f"{found['share_in_fp8']:.1%}".replace("%", " %"),
            f"{found['relative']:.2%}".replace("%", " %"),
        )
        row = f"| {share} | {bfloat16} | {fp8} | {off} | {found['spread']:.4f} |"
        assert row in text, row


def test_the_scaling_model_is_that_of_the_result() -> None:
    found, text = result("scaling_model"), page("benchmarks/README.md")
    schemes = ("fsdp2", "hsdp", "mics", "ours-world", "ours-world-int8", "ours-node")
    for devices in (16, 64, 256, 1024):
        at = found["devices"].index(devices)
        row = (
            " | ".join(
                [
                    f"| {devices}",
                    *(f"{found['seconds'][scheme][at]:.1f} s" for scheme in schemes),
                ]
            )
            + " |"
        )
        assert row in text, row


def test_context_parallel_memory_is_that_of_the_result() -> None:
    degrees = result("context-parallel")["degrees"]
    activations = [f"{mib(found['activation_bytes']):.1f}" for found in degrees]
    assert (
        f"{activations[0]}, {activations[1]} and {activations[2]} MiB of activations"
        in page("docs/context-parallelism.md")
    )


def test_the_page_about_a_run_takes_what_the_result_says() -> None:
    found = result("report")
    said = " ".join(page("docs/monitoring.md").split())
    assert (
        f"{found['reports']:,} reports" in said
        and f"a page of {found['page_bytes'] / 1e6:.2f} MB" in said
    )
    assert f"in {found['processor_seconds']:.1f} s of processor time" in said
    assert f"and {found['wall_seconds']:.0f} s on the clock" in said


def test_the_cost_of_noting_is_that_of_the_result() -> None:
    found = result("noting")
    said = f"{found['difference_ms']:.2f} +- {found['uncertainty_ms']:.2f} ms of the main thread"
    text = page("docs/ranks.md")
    assert said in text and f"{found['share_of_50_ms']:.1%}".replace("%", " %") in text


def test_the_tests_that_promises_name_are_there() -> None:
    table = (
        page("docs/checkpoint-integrity.md")
        .split("| fault | promise | test |")[1]
        .split("\n\n")[0]
    )
    named = [row.rpartition(" | ")[2] for row in table.splitlines()[2:]]
    assert len(named) > 20
    for test, places in (
        found
        for row in named
        for found in re.findall(r"(test_\w+)(?: \(([\w/, ]+)\))?", row)
    ):
        for place in (places or "tests/core/checkpoint").split(", "):
            assert Path(ROOT, place, f"{test}.py").is_file(), (
                f"{test} is not in {place}"
            )


def test_the_cost_of_a_check_of_every_byte_is_that_of_the_result() -> None:
    text = " ".join(page("docs/checkpoint-integrity.md").split())
    for name in ("checkpoint-checked", "checkpoint-1gb"):
        found = result(name)["results"][0]["check"]
        quartiles = {}
        for kind, pairs in found.items():
            ratios = [checked / unchecked for checked, unchecked in pairs]
            quartiles[kind] = [f"{value:.2f}" for value in statistics.quantiles(ratios)]
        low, middle, high = quartiles["seconds"]
        processor = quartiles["processor seconds"][1]
        assert (
            f"{middle} times as long ({low} to {high}), {processor} in processor time, [{name}.json]"
            in text
        )


def test_the_tables_of_optimizers_are_those_of_the_result() -> None:
    spec = importlib.util.spec_from_file_location(
        "optimizers_tried", Path(ROOT, "benchmarks", "optimizers.py")
    )
    assert spec is not None and spec.loader is not None
    bench: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    found, text = result("optimizers"), page("docs/optimizers.md")
    shown = text.split(bench.BEGIN, 1)[1].split(bench.END, 1)[0]
    assert shown.strip() == bench.table(found).strip(), (
        "run benchmarks/optimizers.py --page"
    )
    kinds = {
        (row["library"], row["name"])
        for row in found["rows"]
        if row["verdict"] != "not tried"
    }
    assert len(kinds) >= 60
    seconds = [row["seconds"] for row in found["rows"] if row["verdict"] == "refused"]
    assert max(seconds) < 5


def test_the_lab_rows_of_experts_are_those_of_the_result() -> None:
    text = page("docs/mixture-of-experts.md")
    for row in result("experts")["results"]:
        ratios = row["ratios"].values()
        cells = [
            f"{each[figure]:.2f}" for each in ratios for figure in ("seconds", "bytes")
        ]
        assert f"| {row['nodes']}, {row['mbit']} | {' | '.join(cells)} |" in text


def test_predictions_of_recipes_are_those_of_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = module_of("recipes", monkeypatch)
    shown = page("docs/recipes.md").split(bench.BEGIN, 1)[1].split(bench.END, 1)[0]
    found = result("recipes")
    assert shown.strip() == bench.table(found).strip(), (
        "run benchmarks/recipes.py --page"
    )
    assert [row["name"] for row in found] == [row.name for row in bench.ROWS]
    whole, context = found[:2]
    assert (
        whole["seconds"] is None
        and whole["gib"] > whole["capacity_gib"] > context["gib"]
    ), "the walk of the page"


def module_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a file of benchmarks/."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(
        f"benchmark_{name}", Path(ROOT, "benchmarks", f"{name}.py")
    )
    assert spec is not None and spec.loader is not None
    made: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    return made
