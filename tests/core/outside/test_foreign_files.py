"""Files from elsewhere: whatever is in them, or in their place, a reader returns or
raises one ValueError of ours; and nothing is written through a link."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate_smp.launch import LaunchFile
from smp_core.cluster.links import Links
from smp_core.config import SmpConfig
from smp_core.fp8.monitoring import Fp8Log, draw as draw_fp8
from smp_core.observe.memory_log import draw, read_log
from smp_core.outside.foreign_files import lines_of_log, printable, read_yaml, write_new
from smp_core.planner.hardware import Hardware
from smp_core.planner.model_source import build
from smp_core.planner.search import read_fixed
from smp_core.report.page import page
from smp_core.run_log import write as run_log
from smp_core.run_log.read import Run


def run_page(path: Path) -> None:
    page([Run.read(path)])


def memory_picture(path: Path) -> None:
    draw(read_log(path), path.with_suffix(".png"))


def fp8_picture(path: Path) -> None:
    draw_fp8(Fp8Log.read(path), path.with_suffix(".png"))


def fixed(path: Path) -> None:
    read_fixed({"shard_degree": path.read_text(errors="replace")})


READERS: dict[str, Callable[[Path], Any]] = {
    "run.jsonl": run_page,
    "memory.jsonl": memory_picture,
    "fp8.jsonl": fp8_picture,
    "smp.yaml": SmpConfig.from_yaml,
    "launch.yaml": LaunchFile.read,
    "cluster.yaml": Hardware.parse,
    "links.json": Links.load,
    "config.json": lambda path: build(str(path), 64),
    "fixed.txt": fixed,
}
COLLECTIVE = {
    "latency": 1e-5,
    "bandwidth": 1e10,
    "error": 0.0,
    "points": [[1024, 1e-5], [2048, 2e-5]],
    "by": "library",
}
PLACE = {
    "ranks": 2,
    "all_gather": COLLECTIVE,
    "reduce_scatter": COLLECTIVE,
    "all_reduce": COLLECTIVE,
}
GOOD: dict[str, list[Any]] = {
    "run.jsonl": [
        {"kind": "run", "time": 1, "step": 0, "plan": ["x"]},
        {"kind": "step", "step": 1, "loss": 1.0},
    ],
    "memory.jsonl": [
        {
            "kind": "memory",
            "step": 1,
            "device": {"parameters": 5, "other": 1},
            "host": {"other": 1},
        }
    ],
    "fp8.jsonl": [
        {
            "kind": "fp8",
            "step": 1,
            "modules": {"a": {"input_scale": 1.0, "input_saturated": 0.5}},
        }
    ],
    "smp.yaml": [{"smp_config": {"shard_degree": 2, "units": {"modules": ["Block"]}}}],
    "launch.yaml": [
        {
            "smp_config": {"shard_degree": 2},
            "mixed_precision": "bf16",
            "num_processes": 2,
        }
    ],
    "cluster.yaml": [
        {"nodes": 2, "devices_per_node": 8, "gbit_per_s": 400, "device": "h100-80g"}
    ],
    "links.json": [
        {
            "version": 2,
            "nodes": 2,
            "ranks_per_node": 2,
            "intra": PLACE,
            "inter": PLACE,
            "flat": PLACE,
            "measured_with": "gloo",
        },
    ],
    "config.json": [
        {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 8}
    ],
    "fixed.txt": [2],
}
STRANGE: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        1.5,
        1e308,
        10**30,
        "",
        "x" * 3000,
        "\x1b[2J\x1b]0;owned\x07",
        "é\ud800"[:1],
        [],
        {},
        [[]],
        "nan",
    ),
    *(
        [1] * 50,
        {"a": {"b": {"c": 1}}},
        ["\x1b[31m"],
        {str(n): n for n in range(50)},
        1e9,
        "1e999",
        "../../x",
    ),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the ways to all values inside of one."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(way for key, item in items for way in places(item, (*path, key)))]


def changed(value: Any, way: tuple[Any, ...], new: Any) -> Any:
    if not way:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[way[0]] = changed(copy[way[0]], way[1:], new)
    return copy


def drawn(name: str, draw: random.Random) -> bytes:
    """Return the content of a file: a good one with a strange value, cut, noise in it,
    nested, long, or noise alone."""
    lines = [*GOOD[name], *GOOD[name]] if name.endswith("jsonl") else GOOD[name]
    for _ in range(draw.randrange(3)):
        index = draw.randrange(len(lines))
        way = draw.choice(places(lines[index]))
        lines = changed(lines, (index, *way), draw.choice(STRANGE))
    data = "\n".join(json.dumps(line) for line in lines).encode() + b"\n"
    kind = draw.randrange(8)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        position = draw.randrange(len(data))
        return data[:position] + draw.randbytes(draw.randrange(1, 6)) + data[position:]
    if kind == 2:
        depth = draw.choice([30, 900, 100_000])
        return draw.choice(
            [b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth, b"- " * 5000]
        )
    if kind == 3:
        return draw.randbytes(draw.randrange(200))
    if kind == 4:
        bomb = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
        for n in range(1, 9):
            bomb += b"a%d: &a%d [%s]\n" % (n, n, b", ".join([b"*a%d" % (n - 1)] * 9))
        return draw.choice(
            [
                bomb,
                b"smp_config: &a [*a]\n",
                b"? [a]\n: 1\n",
                b"&a a: *a\n",
                b"x: !!python/name:os.system\n",
            ]
        )
    return data


def outcome(name: str, path: Path) -> str:
    """Return what a reader says, "" for nothing. Anything but a ValueError fails the
    test."""
    try:
        READERS[name](path)
    except ValueError as error:
        return str(error)
    return ""


def read_drawn(seeds: range, folder: Path) -> dict[str, int]:
    accepted = dict.fromkeys(READERS, 0)
    for seed in seeds:
        draw = random.Random(seed)
        name = draw.choice(list(READERS))
        path = folder / name
        path.write_bytes(drawn(name, draw))
        said = outcome(name, path)
        accepted[name] += not said
        assert "\x1b" not in printable(said)
    return accepted


@pytest.mark.parametrize("name", READERS)
def test_a_good_file_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(
        "\n".join(json.dumps(line) for line in GOOD[name]) + "\n"
    )
    assert outcome(name, tmp_path / name) == ""


def test_a_drawn_file_is_read_or_refused_in_our_words(tmp_path: Path) -> None:
    accepted = read_drawn(range(40), tmp_path)
    assert sum(accepted.values()) > 5


@pytest.mark.slow
def test_three_thousand_drawn_files(tmp_path: Path) -> None:
    read_drawn(range(1000, 4000), tmp_path)
    read_drawn(range(40, 80), tmp_path)


@pytest.mark.parametrize("name", [name for name in READERS if name != "fixed.txt"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    os.mkfifo(path)
    assert "is no" in outcome(name, path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "is no" in outcome(name, path)


def test_a_long_line_of_a_log_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with path.open("wb") as file:
        file.write(
            b'{"kind": "run", "step": 0}\n'
            + b'{"kind": "'
            + b"x" * (20 << 20)
            + b'"}\n'
            + b'{"kind": "end", "step": 1}'
        )
    assert [line and line["kind"] for line in lines_of_log(path)] == [
        "run",
        None,
        "end",
    ]


@pytest.mark.slow
def test_pictures_of_many_names_and_steps_are_bounded(tmp_path: Path) -> None:
    log = tmp_path / "fp8.jsonl"
    figures = {
        f"layer.{n}": {"input_scale": 1.0, "input_saturated": n / 3000}
        for n in range(3000)
    }
    log.write_text(
        "".join(
            json.dumps({"kind": "fp8", "step": n, "modules": figures}) + "\n"
            for n in range(2)
        )
    )
    found = Fp8Log.read(log)
    draw_fp8(found, tmp_path / "fp8.png")
    steps = tmp_path / "memory.jsonl"
    line = {"kind": "memory", "device": {"parameters": 5}, "host": {}}
    steps.write_text(
        "".join(json.dumps({**line, "step": n}) + "\n" for n in range(5000))
    )
    draw(read_log(steps), tmp_path / "memory.png")
    assert (tmp_path / "fp8.png").stat().st_size > 1000 and (
        tmp_path / "memory.png"
    ).stat().st_size > 1000


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "report.html").symlink_to(precious)
    write_new(tmp_path / "folder" / "report.html", b"page")
    assert (
        precious.read_text() == "precious"
        and (tmp_path / "folder" / "report.html").read_bytes() == b"page"
    )
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ValueError, match="is a link: name the folder that it leads to"):
        write_new(tmp_path / "link" / "report.html", b"other")
    with pytest.raises(ValueError, match=r"the folder .* cannot be used"):
        write_new(tmp_path / "nowhere" / "report.html", b"other")
    assert sorted(os.listdir(tmp_path / "folder")) == ["report.html"]


def test_yaml_that_is_small_as_text_and_endless_as_values_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match="nested deeper than"):
        read_yaml(path)
    # Aliases as people use them.
    path.write_text("base: &base {a: 1}\nother: {<<: *base, b: 2}\n")
    assert read_yaml(path)["other"] == {"a": 1, "b": 2}


def test_a_log_that_cannot_be_written_ends_no_run_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "memory.jsonl"
    log.symlink_to("/dev/full")
    opened = run_log.start(tmp_path / "run.jsonl", 0)
    for step in range(3):
        run_log.append(log, "memory", step=step, device={}, host={})
    run_log.close(opened)
    assert [
        record.getMessage()
        for record in caplog.records
        if "not written any more" in record.getMessage()
    ] == [f"{log} is not written any more: [Errno 28] No space left on device"]
    assert "not written any more" in (tmp_path / "run.jsonl").read_text()
