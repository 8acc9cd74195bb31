"""A checkpoint that a stranger made: nothing outside of its folder is read, written or
deleted, nothing blocks, and every reader refuses it with a CheckpointError.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import smp_core.checkpoint as checkpoint
from smp_core.checkpoint import CheckpointError, save_checkpoint, save_step
from smp_core.checkpoint.coverage import tiles
from smp_core.cli import app
from tests.core.checkpoint.damage import Edit, edited, replaced
from tests.core.checkpoint.states import rest, values
from tests.core.checkpoint.store_on_disk import PREFIX

TENSORS = "tensors-00000-of-00001.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "victim"
    save_checkpoint(
        path,
        {"state_dict": values(1), "rest": rest(1)},
        extra_files={"config.json": "{}"},
    )
    return path


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "root" / "victim"))


def readers(path: Path, out: Path) -> dict[str, Callable[[], Any]]:
    template = {"state_dict": values(1), "rest": None}
    return {
        "load": lambda: checkpoint.load_checkpoint(path, template),
        "load unverified": lambda: checkpoint.load_checkpoint(
            path, template, verify=None
        ),
        "rest": lambda: checkpoint.read_rest(path, tensors=["*"]),
        "to folder": lambda: checkpoint.consolidate(path, out / "a", verify=None),
        "to ckpt": lambda: checkpoint.consolidate(path, out / "a.ckpt", verify="sizes"),
        "export": lambda: checkpoint.export_checkpoint(path, out / "b", "dcp"),
    }


def refused_by_all(path: Path, match: str, but: tuple[str, ...] = ()) -> None:
    for name, reader in readers(path, path.parent.parent / "out").items():
        if name not in but:
            with pytest.raises(CheckpointError, match=match):
                reader()
    assert any(checkpoint.verify_checkpoint(path, deep=True))


def rename(content: dict[str, Any], file: str, to: str) -> None:
    content["files"][to] = content["files"].pop(file)
    for key in ("index", "rest"):
        content[key] = to if content[key] == file else content[key]


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["extra"].update({"../../planted.pth": "extra/config.json"}),
        lambda m: m["extra"].update({"/tmp/planted.pth": "extra/config.json"}),
        lambda m: m["extra"].update({"..": "extra/config.json"}),
        lambda m: m["extra"].update({"a\nb": "extra/config.json"}),
        lambda m: rename(m, "rest.json", "../../outside.json"),
        lambda m: rename(m, "index.json", "/etc/hostname"),
        lambda m: rename(m, TENSORS, f"extra/../../{TENSORS}"),
    ],
    ids=[
        "extra up",
        "extra absolute",
        "extra dots",
        "extra line end",
        "rest up",
        "index absolute",
        "tensors up",
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused_when_the_manifest_is_read(
    copy: Path, edit: Edit
) -> None:
    before = sorted(copy.parent.parent.rglob("*"))
    edited(copy, edit)
    refused_by_all(copy, "not trusted")
    assert sorted(copy.parent.parent.rglob("*")) == before
    with pytest.raises(CheckpointError, match="not trusted"):
        checkpoint.read_manifest(copy)
    assert checkpoint.find_checkpoints(copy.parent) == []


def test_a_slice_in_a_file_elsewhere_is_refused(copy: Path) -> None:
    edited(
        copy,
        lambda i: i["tensors"]["state_dict.half"]["chunks"][0].update(
            file="../../secret"
        ),
        "index.json",
    )
    refused_by_all(copy, "not trusted")


def test_a_file_kept_along_does_not_replace_what_an_export_makes(
    copy: Path, tmp_path: Path
) -> None:
    edited(
        copy, lambda m: m["extra"].update({"model.safetensors": "extra/config.json"})
    )
    with pytest.raises(CheckpointError, match=r"keeps a file model\.safetensors along"):
        checkpoint.consolidate(copy, tmp_path / "out")


def test_overwriting_a_planted_manifest_deletes_nothing_outside(
    copy: Path, tmp_path: Path
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "root" / "neighbour").write_text("x")
    edited(
        copy, lambda m: m["files"].update({"../../thesis.tex": m["files"]["rest.json"]})
    )
    for name in os.listdir(copy):  # as on an object store, where names carry the save
        if name not in ("manifest.json", "extra"):
            os.rename(
                copy / name,
                copy
                / name.replace(".", "-000000000000.", 1).replace(
                    "00001-000", "00001-000"
                ),
            )
    save_checkpoint(f"{PREFIX}{copy}", {"state_dict": values(2)})
    assert (tmp_path / "thesis.tex").exists() and (
        tmp_path / "root" / "neighbour"
    ).exists()
    assert checkpoint.verify_checkpoint(copy, deep=True) == []


@pytest.mark.parametrize(
    "file",
    [
        TENSORS,
        "index.json",
        "rest.json",
        "rest.pt",
        "extra/config.json",
        "manifest.json",
    ],
)
def test_a_link_is_not_followed(copy: Path, tmp_path: Path, file: str) -> None:
    os.rename(copy / file, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", copy / file)
    unread = {
        "extra/config.json": ("load", "load unverified", "rest"),
        "rest.pt": ("to folder",),
    }
    refused_by_all(copy, "is a link.*cp -rL", unread.get(file, ()))


def test_a_linked_folder_in_a_checkpoint_is_not_followed_but_a_link_to_a_checkpoint_is(
    copy: Path, tmp_path: Path
) -> None:
    os.symlink(copy, tmp_path / "last.ckpt")
    assert checkpoint.verify_checkpoint(tmp_path / "last.ckpt", deep=True) == []
    os.rename(copy / "extra", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", copy / "extra")
    assert "is a link" in checkpoint.verify_checkpoint(copy)[0]


@pytest.mark.parametrize("file", [TENSORS, "index.json", "rest.json", "manifest.json"])
def test_a_pipe_in_the_place_of_a_file_blocks_nobody(copy: Path, file: str) -> None:
    (copy / file).unlink()
    os.mkfifo(copy / file)
    refused_by_all(copy, "no regular file")


@pytest.mark.parametrize("file", ["manifest.json", "index.json", "rest.json"])
def test_json_that_is_nested_without_end_is_refused(copy: Path, file: str) -> None:
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    (copy / file).write_bytes(deep) if file == "manifest.json" else replaced(
        copy, file, deep
    )
    refused_by_all(copy, "nested deeper than")


def test_a_manifest_that_is_too_long_is_not_read(copy: Path) -> None:
    with open(copy / "manifest.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse: it takes no room
    refused_by_all(copy, "at most 67108864 are read")


@pytest.mark.parametrize("size", [1 << 50, -1, True, 1.5, "8", None])
def test_sizes_out_of_range_are_refused_before_anything_is_allocated(
    copy: Path, size: Any
) -> None:
    edited(copy, lambda m: m["files"][TENSORS].update(header_bytes=size))
    refused_by_all(copy, "header_bytes is")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t["chunks"].clear(), "do not cover"),
        (lambda t: t.update(shape=[7, 6]), "do not cover"),
        (lambda t: t.update(shape=[1 << 40, 1 << 20]), "do not cover"),
        (lambda t: t["chunks"].append(t["chunks"][0]), "do not cover it, or overlap"),
        (
            lambda t: t["chunks"][0].update(bytes=[1 << 40, (1 << 40) + 140]),
            "outside of tensors-",
        ),
        (lambda t: t["chunks"][0].update(bytes=[0, 140]), "outside of tensors-"),
        (lambda t: t["chunks"][0].update(offset=[1, 0]), "does not fit the tensor"),
        (lambda t: t["chunks"][0].update(shape=[7]), "does not fit the tensor"),
        (lambda t: t.update(dtype="load"), "not a torch dtype"),
        (lambda t: t.update(path=[{"a": []}]), "no key of a dict"),
        (lambda t: t.update(shape="7"), "not list"),
    ],
    ids=[
        "none",
        "larger",
        "huge",
        "twice",
        "behind",
        "header",
        "offset",
        "dims",
        "dtype",
        "path",
        "text",
    ],
)
def test_slices_that_do_not_make_their_tensor_are_refused(
    copy: Path, edit: Edit, message: str
) -> None:
    edited(
        copy,
        lambda index: edit(index["tensors"]["state_dict.wide.weight"]),
        "index.json",
    )
    refused_by_all(copy, message)


def test_bytes_that_two_tensors_share_are_refused(copy: Path) -> None:
    def share(index: dict[str, Any]) -> None:
        index["tensors"]["state_dict.more"] = {
            **index["tensors"]["state_dict.wide.weight"],
            "path": ["more"],
        }

    edited(copy, share, "index.json")
    refused_by_all(copy, "the same bytes of")


def test_boxes_tile_as_meshes_cut() -> None:
    grid = [((r, c), (n, 2)) for r, n in ((0, 3), (3, 2)) for c in (0, 2)]
    assert tiles(grid, (5, 4)) and tiles(grid[::-1], (5, 4)) and tiles([((), ())], ())
    # No cut along the first dim.
    assert (
        tiles([((0, 0), (5, 1)), ((0, 1), (2, 3)), ((2, 1), (3, 3))], (5, 4)) is False
    )
    assert not tiles(grid[:-1], (5, 4))
    assert not tiles([*grid, grid[0]], (5, 4))
    assert not tiles([((0, 0), (3, 4)), ((2, 0), (2, 4))], (5, 4)), (
        "five rows, but one twice and one never"
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {
                "state": {
                    "rest": {"$numpy": "O", "shape": [1], "data": "AAAAAAAAAAA="}
                },
                "per_rank": [],
            },
            "no number",
        ),
        ({"state": {"rest": {"$tuple": 3}}, "per_rank": []}, "damaged"),
        ({"state": {"rest": {"$set": [[1]]}}, "per_rank": []}, "damaged"),
        ({"state": {"rest": {"$pt": "99"}}, "per_rank": []}, "damaged"),
        ({"state": {"rest": {"$float": "one"}}, "per_rank": []}, "damaged"),
        ({"state": {"rest": {"$tensor": "nobody"}}, "per_rank": []}, "damaged"),
        ({"state": {"rest": {"$eval": "1"}}, "per_rank": []}, "does not know"),
        ({"state": "text", "per_rank": []}, "has no state"),
        (["state"], "has no state"),
    ],
)
def test_a_tree_that_means_nothing_is_refused(
    copy: Path, tree: Any, message: str
) -> None:
    edited(copy, lambda content: content.update(tree=tree), "rest.json")
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read_rest(copy, tensors=["*"])
    with pytest.raises(CheckpointError, match=message):
        checkpoint.consolidate(copy, copy.parent / "a.ckpt")


def test_listing_and_newest_skip_what_is_broken_and_name_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4, 5):
        save_step(tmp_path, step, {"state_dict": values(step)})
    (tmp_path / "step-00000003" / "manifest.json").write_bytes(b"[" * 1_000_000)
    (tmp_path / "step-00000004" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "step-00000004" / "manifest.json")
    edited(
        tmp_path / "step-00000005",
        lambda m: m["files"][TENSORS].update(header_bytes=1 << 60),
    )
    (tmp_path / "LATEST").write_bytes(b"\xff\xfe\n")
    assert checkpoint.find_checkpoints(tmp_path) == ["step-00000001", "step-00000002"]
    assert checkpoint.newest_checkpoint(tmp_path) == str(tmp_path / "step-00000002")
    assert all(f"step-0000000{step}" in caplog.text for step in (3, 4, 5))
    caplog.clear()
    shown = CliRunner().invoke(
        app, ["checkpoint", "list", str(tmp_path)], env={"COLUMNS": "300"}
    )
    assert (
        shown.exit_code == 0
        and shown.output.count("broken") == 3
        and shown.output.count("whole") == 2
    )
    assert "LATEST" in caplog.text
    save_step(tmp_path, 6, {"state_dict": values(6)}, keep_last=2)
    assert checkpoint.find_checkpoints(tmp_path) == ["step-00000002", "step-00000006"]


def test_what_a_checkpoint_says_is_no_markup_and_no_escape_for_the_terminal(
    copy: Path,
) -> None:
    edited(copy, lambda m: m["metadata"].update({"[/red]": "\x1b]0;title\x07[/foo]"}))
    edited(copy, lambda m: m.update(created="[/x]", meshes=[{}], step=10**30))
    for command in ("inspect", "list"):
        where = str(copy if command == "inspect" else copy.parent)
        shown = CliRunner().invoke(
            app, ["checkpoint", command, where], env={"COLUMNS": "200"}
        )
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.output and "[/x]" in shown.output


def test_an_import_follows_links_only_inside_and_into_the_hub_s_cache(
    tmp_path: Path,
) -> None:
    blobs, folder = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "1"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    weights = {name: tensor.contiguous() for name, tensor in values(2).items()}
    save_file(weights, blobs / "a", {"format": "pt"})
    (blobs / "b").write_text("{}")
    (tmp_path / "id_rsa").write_text("a secret")
    for name, target in {
        "model.safetensors": blobs / "a",
        "config.json": blobs / "b",
    }.items():
        os.symlink(target, folder / name)
    os.symlink(tmp_path / "id_rsa", folder / "notes.txt")
    os.mkfifo(folder / "tokenizer.json")
    checkpoint.import_checkpoint(folder, tmp_path / "ours")
    assert list(checkpoint.read_manifest(tmp_path / "ours").extra) == ["config.json"]
    (folder / "model.safetensors").unlink()
    os.symlink(shutil.copy(blobs / "a", tmp_path), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="out of the folder"):
        checkpoint.import_checkpoint(folder, tmp_path / "again")
