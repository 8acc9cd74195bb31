"""What torch-smp takes FSDP2, DTensor and autograd to do: one test for each assumption
(smp_core/sharding/fsdp/)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.contract.observing import observe
from tests.harness import run_ranks


@pytest.fixture(scope="module")
def seen() -> Any:
    """By observation what rank 0 saw; rank 1 was there too."""
    first, second = run_ranks(observe, 2)
    errors = {
        name: found
        for name, found in (*first.items(), *second.items())
        if isinstance(found, str)
    }

    def of(name: str) -> Any:
        if name in errors:
            pytest.fail(errors[name])
        return first[name]

    return of


def test_the_hook_of_a_reduction_gets_a_flat_sum_in_the_dtype_of_reductions(
    seen: Any,
) -> None:
    """Of 5 x 2 parameters over two ranks: 3 rows each, padding included."""
    found = seen("flat_sums")
    assert (found["dtype"], found["shape"], found["sizes"]) == (
        torch.float32,
        (6,),
        [6],
    )
    assert found["values"] == [2.0] * 6


def test_gradients_of_shards_are_views_of_that_sum(seen: Any) -> None:
    assert seen("flat_sums")["shares memory"]


def test_a_flat_sum_holds_parameters_in_order_each_padded(seen: Any) -> None:
    found = seen("order_of_parameters")
    assert found["flat"] == found["by parameter"] and found["order"] == [0, 1]


def test_communication_objects_are_called_as_documented_and_waited_for(
    seen: Any,
) -> None:
    calls = seen("communication")["calls"]
    assert {word for word, _ in calls} == {
        "input is its slot of the output",
        "gradients are off",
        "waited",
        "sums",
    }
    assert all(value for word, value in calls)


def test_every_gather_goes_through_unshard_and_every_reduction_through_post_backward(
    seen: Any,
) -> None:
    found = seen("gathers_and_reductions")["happened"]
    forwards = [f"gather {name} forward" for name in ("root", "first", "second")]
    assert found[:3] == forwards
    assert {"gather second backward", "gather first backward"} <= set(found[3:])
    assert [each for each in found if each.startswith("reduce")].count(
        "reduce second"
    ) == 1
    assert {"reduce root", "reduce first", "reduce second"} <= set(found)


def test_a_unit_without_gradients_of_inputs_is_reduced_at_the_end_of_the_pass(
    seen: Any,
) -> None:
    found = seen("gathers_and_reductions")["happened"]
    assert found.index("reduce second") < min(
        found.index("reduce root"), found.index("reduce first")
    )


def test_callbacks_queued_from_a_callback_come_behind_those_of_fsdp2(seen: Any) -> None:
    found = seen("gathers_and_reductions")
    assert found["end"] == [[found["all"], True]]


def test_after_forward_roots_are_unsharded_and_units_are_sharded(seen: Any) -> None:
    found = seen("gathers_and_reductions")
    assert (found["unsharded"], found["sharded"]) == (
        [True, False, False],
        [False, True, True],
    )


def test_modules_show_copies_inside_of_a_call_and_shards_between_them(
    seen: Any,
) -> None:
    found = seen("copies")
    assert (
        found["before"] == [None, None]
        and found["shown inside"] == [True, True]
        and found["shards between"]
    )


def test_a_copy_is_the_same_tensor_each_time_and_gathers_are_no_writes(
    seen: Any,
) -> None:
    found = seen("copies")
    assert found["the same object"] and found["versions"][0] == found["versions"][1]


def test_four_hooks_stand_around_the_gather_and_the_freeing(seen: Any) -> None:
    assert seen("hooks_around")["order"] == [
        ("before the gather", False),
        ("behind the gather", True),
        ("before it is freed", True),
        ("behind that", False),
    ]


def test_hooks_that_are_always_called_are_called_after_a_failed_forward(
    seen: Any,
) -> None:
    assert seen("hooks_around")["failed"] == ["called", "raised"]


def test_gradients_without_synchronisation_stay_unsharded(seen: Any) -> None:
    found = seen("held_gradients")
    assert found["there"] and found["not reduced"]


def test_what_is_handed_over_is_what_is_reduced_outside_of_a_pass(seen: Any) -> None:
    found = seen("held_gradients")
    assert (found["dtype"], found["reduced"], found["others"]) == (
        torch.float32,
        [4.0],
        True,
    )


def test_a_failed_pass_can_be_forgotten(seen: Any) -> None:
    assert seen("failed_passes") == {
        "failed": "ZeroDivisionError",
        "sharded": True,
        "next step": True,
    }


def test_a_gather_ahead_of_a_forward_that_never_came_can_be_dropped(seen: Any) -> None:
    assert seen("gathers_ahead") == {
        "in flight": True,
        "dropped": True,
        "trains on": True,
    }


def test_shards_can_be_exchanged_for_another_dtype(seen: Any) -> None:
    found = seen("exchanged_shards")
    assert found == {
        "the same object": True,
        "stored": torch.bfloat16,
        "computed": [torch.bfloat16],
    }


def test_the_policy_of_a_model_that_came_sharded_can_be_read(seen: Any) -> None:
    assert seen("parts_of_fsdp")["policy"] == (torch.bfloat16, torch.float32, False)


def test_a_gradient_can_be_made_like_its_parameter(seen: Any) -> None:
    assert seen("parts_of_fsdp")["gradient"] == (True, True, torch.float32)


def test_a_unit_has_the_parameters_outside_of_inner_units(seen: Any) -> None:
    found = seen("parts_of_fsdp")
    assert (
        found["places"] == [[("FSDPChain", "odd")]]
        and found["members are of their own"]
    )


def test_a_method_can_be_put_between_the_hooks_of_a_forward(seen: Any) -> None:
    assert seen("methods_as_forwards")["inside"] == (True, False, 1)


def test_torchs_own_two_hop_holds_its_sum(seen: Any) -> None:
    assert seen("two_hops_of_torch") == {"held": 80, "forgotten": 0}


def test_layers_that_are_split_already_are_sharded_on_both_axes(seen: Any) -> None:
    assert seen("split_layers") == {"axes": ("shard", "tensor"), "local": (2, 4)}


def test_assignment_to_data_changes_the_outer_storage_and_not_the_local_tensor(
    seen: Any,
) -> None:
    found = seen("tensors")
    assert (
        found["one storage object"] and found["assigned"] and found["to_local shares"]
    )


def test_writes_and_hooks_of_a_parameter_can_be_seen(seen: Any) -> None:
    found = seen("tensors")
    assert (
        found["written"]
        and found["hooks"] == (True, True, True)
        and found["gradients' dtype"] == torch.float32
    )


def test_backward_passes_have_numbers(seen: Any) -> None:
    assert seen("tensors")["passes"] == (-1, True)


def test_an_operations_rule_sees_its_operands_and_may_leave_it_to_torch(
    seen: Any,
) -> None:
    """smp_core/sharding/operands.py"""
    found = seen("dispatch_rules")
    assert found["results"] == [False, True]
    assert found["rule saw"] == [False, True, False, False, True, True]
