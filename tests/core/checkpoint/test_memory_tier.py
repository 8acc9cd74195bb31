"""The newest state in shared memory: what survives which loss, what is never used, and
what is left behind."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smp_core.checkpoint import (
    CheckpointError,
    load_checkpoint,
    read_per_rank,
    save_checkpoint,
)
from smp_core.checkpoint.memory import save as memory_save, tier as memory_tier
from smp_core.checkpoint.memory.folder import NodeMemory
from smp_core.checkpoint.memory.slots import SharedSlots
from smp_core.checkpoint.memory.tier import MemoryTier
from smp_core.checkpoint.untrusted import StoreError
from smp_core.torch_facts import streams
from tests.core.checkpoint.memory_states import (
    files,
    found_in,
    kept_until,
    state_of,
    tier,
)
from tests.core.checkpoint.states import differences, gathered, sharded_state, step_in
from tests.harness import run_ranks, run_script


def keep(folder: str, degree: int, steps: int = 3) -> list[Any]:
    """Keep some states as training would, and end without a word; the states, whole."""
    kept, expected = tier(folder), []
    kept.leave()
    kept.begin(0)
    for step in range(1, steps + 1):
        state = sharded_state(degree, seed=step)
        expected.append(gathered(state))
        kept.save(state, step, {"step": step}, {"rank": dist.get_rank(), "step": step})
        kept.before_update()
        for name in ("state_dict", "optimizer_states", "best"):
            clear(state[name])
    kept._saver.wait()
    changes_are_seen(kept._saver.slots, sharded_state(degree))
    return expected


def changes_are_seen(slots: SharedSlots, state: Any) -> None:
    """What changes between the call and the copy is named: the copy would be of no one
    instant."""
    slots.turn()
    slots.later = ("",)
    for change in ([], ["one_row", "wide.weight"]):
        slots.fill(state["state_dict"])
        for name in change:
            state["state_dict"][name].mul_(2)
        ties = ["tied.weight"] if change else []  # the same memory as wide.weight
        assert sorted(slots.copy_rest()) == sorted(change + ties)


def clear(state: Any) -> None:
    if isinstance(state, torch.Tensor):
        state.zero_()
    else:
        for value in (
            state.values()
            if isinstance(state, dict)
            else state
            if isinstance(state, list)
            else ()
        ):
            clear(value)


def resume(folder: str, degree: int) -> Any:
    """What a new process finds: the state, each rank's own part, how many ranks were
    sent theirs."""
    kept = tier(folder)
    found = kept.find()
    if found is None:
        return None
    opened = kept.take(found)
    state = sharded_state(degree, seed=-1)
    load_checkpoint(opened, state)
    own = read_per_rank(opened)
    return found.step, gathered(state), own, found.sent


def folder_of(folder: Path, node: int) -> Path:
    (found,) = folder.glob(f"torch-smp-*/*-node{node}")
    return found


@pytest.mark.parametrize("degree", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_lost_node_is_given_its_part_by_a_replica_or_from_the_copy(
    tmp_path: Path, degree: int
) -> None:
    """Groups of 2 fill a node, so that the other one has the same shards; of 4 they do
    not, and a copy is kept."""
    expected = run_ranks(keep, 4, str(tmp_path), degree, ranks_per_node=2)[0]
    sizes = [
        len(list(folder_of(tmp_path, node).glob("rank-*/tensors"))) for node in range(2)
    ]
    # Two of each rank, and of each rank of the node before.
    assert sizes == ([4, 4] if degree == 2 else [8, 8])
    shutil.rmtree(folder_of(tmp_path, 1))
    for step, state, own, sent in run_ranks(
        resume, 4, str(tmp_path), degree, ranks_per_node=2
    ):
        assert (step, sent) == (3, [2, 3])
        assert differences(state, expected[-1]) == []
        assert own == [{"rank": rank, "step": 3} for rank in range(4)]


@pytest.mark.parametrize("event", ["nodes change places", "a replica has no record"])
def test_a_part_that_lies_on_the_node_as_another_rank_s_is_used(
    event: str, tmp_path: Path
) -> None:
    per_node = 2 if event == "nodes change places" else 4
    expected = run_ranks(keep, 4, str(tmp_path), 2, ranks_per_node=per_node)[0]
    if per_node == 2:
        first, second = (folder_of(tmp_path, node) for node in range(2))
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
    else:  # the job was killed between the records of two replicas
        (folder,) = tmp_path.glob("torch-smp-*/*")
        (manifest,) = [
            path
            for path in folder.glob("rank-00001-*/manifest.json")
            if step_in(path) == 3
        ]
        manifest.unlink()
    for step, state, own, sent in run_ranks(
        resume, 4, str(tmp_path), 2, ranks_per_node=per_node
    ):
        assert (step, sent) == (3, [])
        assert differences(state, expected[-1]) == []
        assert own == [{"rank": rank, "step": 3} for rank in range(4)]


# One process


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMP_MEMORY_FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """States are kept beside training, as those are that are not as small as here."""
    monkeypatch.setattr(memory_save, "_SMALL_BYTES", -1)


def steps_in(folder: Path) -> list[int]:
    return sorted(map(step_in, files(folder, "rank-*/manifest.json")))


def test_two_states_are_kept_and_none_after_a_good_end(alone: Path) -> None:
    kept = kept_until(alone, 5)
    parts = [
        sorted(path.name for path in part.iterdir()) for part in files(alone, "rank-*")
    ]
    assert (
        parts
        == [["index.json", "manifest.json", "rest.json", "rest.pt", "tensors"]] * 2
    )
    assert steps_in(alone) == [4, 5]
    assert all(
        path.stat().st_mode & 0o777 == 0o600 for path in files(alone, "rank-*/*")
    )
    assert found_in(alone) == 5
    kept.close(ended_well=True)
    assert files(alone, "") == []


def test_what_stays_after_a_bad_end_is_named_and_so_is_what_others_left(
    alone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_until(alone, 1)
    other = MemoryTier(1, f"{alone}/another", [[0]], posed=False, layout="")
    assert "for a job that has ended" not in caplog.text, "it still lives"
    kept.close(ended_well=False)
    assert "stays in memory" in caplog.text and f"rm -r {alone}" in caplog.text
    MemoryTier(1, f"{alone}/another", [[0]], posed=False, layout="").close(
        ended_well=True
    )
    assert "holds 0.0 MiB of memory for a job that has ended" in caplog.text
    assert found_in(alone) == 1, "and is not touched"
    other.close(ended_well=True)


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["manifest.json", "tensors", "index.json", "rest.json", "rest.pt"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "open to others", "link"])
def test_what_is_damaged_or_not_ours_is_as_if_it_were_not_there(
    alone: Path, name: str, damage: str
) -> None:
    kept_until(alone, 4)
    (victim,) = [
        part / name
        for part in files(alone, "rank-*")
        if step_in(part / "manifest.json") == 4
    ]
    if damage == "flip":
        content = victim.read_bytes()
        # Of a manifest its step, which says nothing by itself of being another one.
        flip(victim, content.index(b'"step": 4') + 8 if name == "manifest.json" else 20)
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-1])
    elif damage == "open to others":
        victim.chmod(0o644)
    else:
        content = victim.read_bytes()
        victim.unlink()
        if damage == "link":
            (alone / "elsewhere").write_bytes(content)
            victim.symlink_to(alone / "elsewhere")
    assert found_in(alone) == 3


def test_a_save_that_ends_in_the_middle_leaves_the_state_before(
    alone: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept_until(alone, 2)

    def killed(*_: Any) -> None:
        raise OSError("killed")

    monkeypatch.setattr(type(kept.folder), "write", killed)
    kept.save(state_of(3), 3, {}, 3)
    with pytest.raises(
        CheckpointError, match="step 3 was not kept in memory: OSError: killed"
    ):
        kept.save(state_of(4), 4, {}, 4)
    monkeypatch.undo()
    assert steps_in(alone) == [2], "the tensors of step 1 have been written over"
    assert found_in(alone) == 2


def test_a_state_that_is_given_up_costs_no_other(
    alone: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 changes while it is copied, and the save after it is killed."""

    def killed(*_: Any) -> None:
        raise OSError("killed here")

    kept = kept_until(alone, 2)
    with monkeypatch.context() as patched:
        patched.setattr(SharedSlots, "copy_rest", lambda slots: ["weights"])
        kept.save(state_of(3), 3, {}, 3)
        kept._saver.wait()
    monkeypatch.setattr(memory_save, "stage", killed)
    kept.save(state_of(4), 4, {}, 4)
    with pytest.raises(CheckpointError, match="killed here"):
        kept._saver.wait()
    assert found_in(alone) == 2


def test_a_small_state_is_kept_before_training_goes_on(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, write = kept_until(alone, 1), NodeMemory.write

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(NodeMemory, "write", slow)
    for step in (2, 3):
        kept.save(state_of(step), step, {}, step)
        assert steps_in(alone) == [step - 1, step]


def test_a_store_that_fails_once_costs_one_state(
    alone: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 cannot be numbered among the checkpoints on disk; training goes on, and so
    do the states."""

    def fails(path: str) -> int:
        raise StoreError("no answer")

    kept = kept_until(alone, 1)
    with monkeypatch.context() as patched:
        patched.setattr(memory_tier, "next_sequence", fails)
        kept.save(state_of(2), 2, {}, 2)
        kept._saver.wait()
    assert (
        "step 2 is not kept in memory: its place among the checkpoints on disk is not known"
        in caplog.text
    )
    kept.save(state_of(3), 3, {}, 3)
    kept._saver.wait()
    assert found_in(alone) == 3


def test_the_optimizer_waits_for_the_copy(
    alone: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gate, copy = kept_until(alone, 1), threading.Event(), SharedSlots.copy_rest

    def copy_later(slots: SharedSlots) -> list[str]:
        assert gate.wait(240)
        return copy(slots)

    monkeypatch.setattr(SharedSlots, "copy_rest", copy_later)
    kept.save(state_of(2), 2, {}, 2)
    optimizer = threading.Thread(target=kept.before_update, daemon=True)
    optimizer.start()
    optimizer.join(0.1)
    assert optimizer.is_alive()
    gate.set()
    optimizer.join(240)
    assert not optimizer.is_alive()
    kept._saver.wait()
    assert found_in(alone) == 2


def test_a_run_waits_for_what_the_one_before_still_writes(
    alone: Path, beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails does not wait for its last save. Another one in the process
    finds it."""
    kept, gate, copy = kept_until(alone, 1), threading.Event(), SharedSlots.copy_rest

    def copy_later(slots: SharedSlots) -> list[str]:
        assert gate.wait(240)
        return copy(slots)

    monkeypatch.setattr(SharedSlots, "copy_rest", copy_later)
    kept.save(state_of(2), 2, {}, 2)
    kept.close(ended_well=False)
    found: list[int | None] = []
    after = threading.Thread(target=lambda: found.append(found_in(alone)), daemon=True)
    after.start()
    after.join(0.2)
    gate.set()
    after.join(240)
    assert found == [2]


def test_an_attempt_that_begins_again_forgets_what_it_kept(alone: Path) -> None:
    """With the same states, as Trainer's auto_find_batch_size: a later step of the
    first attempt is not newer."""
    kept = kept_until(alone, 5)
    kept.begin(0)
    kept.save(state_of(1), 1, {}, 1)
    kept._saver.wait()
    assert found_in(alone) == 1


def test_a_tensor_may_take_the_place_of_another(alone: Path) -> None:
    """The files are as long as before, and one tensor lies elsewhere in them."""
    kept = kept_until(alone, 1)
    first, second = (
        {"a": torch.ones(6), "b": torch.ones(6)},
        {"c": torch.full((6,), 2.0), "a": torch.full((6,), 3.0)},
    )
    for step, state in enumerate((first, first, second, second), 2):
        kept.save(state, step, {}, step)
    kept._saver.wait()
    again, found = tier(str(alone)), {name: torch.zeros(6) for name in second}
    load_checkpoint(again.take(again.find()), found)
    assert differences(found, second) == []


class Driver:
    """Stands for CUDA's: what is registered with it, by address; refuses if it is told
    to."""

    def __init__(self, refuses: int) -> None:
        self.refuses, self.registered = refuses, dict[int, int]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.registered[address] = size
        return self.refuses

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.mark.parametrize("refuses", [0, 2])
@pytest.mark.parametrize("ended_well", [True, False])
def test_memory_is_given_back_to_the_driver_and_its_refusal_is_said(
    alone: Path,
    refuses: int,
    ended_well: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(refuses)
    monkeypatch.setattr(streams, "pins", lambda device: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    kept = kept_until(alone, 3)
    assert len(driver.registered) == (0 if refuses else 2), "the two files of a rank"
    assert (
        "did not pin 24 bytes of shared memory (CUDA error 2)" in caplog.text
    ) == bool(refuses)
    assert found_in(alone) == 3, "kept all the same"
    kept.save({"weights": torch.ones(9)}, 4, {}, 4)
    kept._saver.wait()
    assert sorted(driver.registered.values()) == ([] if refuses else [24, 36]), (
        "the file of another size is given back"
    )
    again, longer = tier(str(alone)), {"weights": torch.zeros(9)}
    load_checkpoint(again.take(again.find()), longer)
    assert torch.equal(longer["weights"], torch.ones(9))
    kept.close(ended_well)
    assert driver.registered == {}


def test_an_ordinary_checkpoint_is_not_taken_for_a_part(
    alone: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept_until(alone, 3)
    (victim,) = [
        part for part in files(alone, "rank-*") if step_in(part / "manifest.json") == 3
    ]
    shutil.rmtree(victim)
    save_checkpoint(victim, state_of(9), metadata={"step": 9})
    for path in [victim, *victim.iterdir()]:
        path.chmod(path.stat().st_mode & 0o700)
    assert found_in(alone) == 2
    assert "is a checkpoint, but no part of a state in memory" in caplog.text


def test_states_of_other_ranks_or_degrees_are_not_used(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_until(alone, 1)
    assert found_in(alone, layout="shard 4") is None
    assert found_in(alone) == 1


def test_a_loop_leaves_alone_what_a_trainer_keeps_for_the_same_folder(
    alone: Path,
) -> None:
    kept_until(alone, 1, by="trainer")
    other = tier(str(alone), by="loop")
    assert other.find() is None
    other.leave()
    assert found_in(alone, by="trainer") == 1


def test_a_folder_that_others_can_write_to_is_refused(alone: Path) -> None:
    kept_until(alone, 1)
    (top,) = alone.glob("torch-smp-*")
    top.chmod(0o777)
    with pytest.raises(
        CheckpointError,
        match=r"drwxrwxrwx, and states .* remove it, or set SMP_MEMORY_FOLDER",
    ):
        tier(str(alone))


def test_too_little_memory_is_said_at_the_first_save(
    alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    kept = tier(str(alone))
    with pytest.raises(
        CheckpointError,
        match=r"no room for 0\.0 MiB .*docker run --shm-size.*memory_every_n_steps",
    ):
        kept.save(state_of(1), 1, {}, 1)
    assert files(alone, "rank-*/tensors") == []


@pytest.mark.timeout(1200)
def test_a_kill_at_any_call_of_a_save_leaves_a_whole_state(tmp_path: Path) -> None:
    """The one before until the record is there, then the new one; values to the last
    bit, nothing left behind."""
    done = run_script(
        ["-m", "tests.core.checkpoint.memory_kills", str(tmp_path)], timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert [outcome["killed"] for outcome in seen] == [True] * (len(seen) - 1) + [False]
    assert len(seen) == 14, (
        "half a copy; three files removed; three removed, opened and renamed; none"
    )
    assert [outcome["found"] for outcome in seen] == [2] * (len(seen) - 1) + [3], seen
    assert all(outcome["exact"] and outcome["left"] == [] for outcome in seen), seen


@pytest.mark.parametrize("steps", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_memory_is_bounded_while_names_change(alone: Path, steps: int) -> None:
    """As ``best_k_models`` do, which have the names of checkpoints."""
    kept, seen = kept_until(alone, 0), set()
    for step in range(1000, 1000 + steps):
        best = {
            f"step={step - back}.ckpt": torch.tensor(float(step)) for back in range(2)
        }
        kept.save(
            {"weights": torch.ones(100), "best": best, "step": step}, step, {}, None
        )
        if step >= 1002:
            kept._saver.wait()
            seen.add(
                (
                    len(files(alone, "**/*")),
                    sum(path.stat().st_size for path in files(alone, "**/*")),
                )
            )
    assert len(seen) == 1, seen
    assert len(kept._saver.slots._items) == 3, "names of before are forgotten"


# In the normal run: kills at all calls of a save, above, and a lost node under both
# faces.
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", [1, 60])
def test_kills_and_lost_nodes_of_stages_and_tensor_ranks(
    number: int, tmp_path: Path
) -> None:
    """What any rank knew to be kept is found, or the state after it, to the last
    bit."""
    done = run_script(
        ["-m", "tests.core.checkpoint.memory_trials", str(tmp_path), str(number), "39"],
        timeout=3500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    assert len(seen) == number
    wrong = [
        each
        for each in seen
        if each.get("newer") not in (0, 1) or not each["exact"] or each["left"]
    ]
    assert wrong == [], done.stderr[-2000:]
    assert number == 1 or any(each["sent"] for each in seen), (
        "no rank got its part from another node"
    )


def test_a_run_that_is_set_back_forgets_what_it_kept(alone: Path) -> None:
    kept = kept_until(alone, 5)
    kept.set_back(2)
    assert found_in(alone) is None
    assert kept.is_due(3) and not kept.is_due(2)
    kept.save(state_of(3), 3, {}, 3)
    kept._saver.wait()
    assert found_in(alone) == 3
