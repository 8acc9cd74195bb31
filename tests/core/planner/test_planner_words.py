"""What the planner is told (models, clusters) and says of its constants."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.planner_dry_run import CASES
from smp_core.planner.devices import DEVICES, MACHINES
from smp_core.planner.fitted import BANDS, FITTED, MEMORY_BAND
from smp_core.planner.hardware import Hardware
from smp_core.planner.known_models import KNOWN_MODELS, known_model
from smp_core.planner.model_source import build
from smp_core.planner.trace import trace_model
from tests.harness import ROOT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama-3.1-8c", "did you mean 'llama-3.1-8b'"),
        ("owner/unheard-of", "hf download owner/unheard-of config.json"),
        ("tests.core.planner.planner_models:nothing", "write package.module:function"),
        ("tests.core.planner.planner_models:without_batch", r"return \(model, batch\)"),
        ("tests.core.planner.planner_models:without_blocks", "nn.ModuleList"),
    ],
)
def test_a_model_that_cannot_be_traced_says_what_to_write(
    words: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        trace_model(words, 16)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"architectures": ["WhisperForConditionalGeneration"]},
            "WhisperForCausalLM is what would be planned",
        ),
        ({}, "is_encoder_decoder"),
    ],
)
def test_an_encoder_and_decoder_is_not_planned_as_its_decoder(
    fields: dict[str, Any], said: str
) -> None:
    sizes = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 2,
        "vocab_size": 96,
    }
    special = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0
    )
    with pytest.raises(ValueError, match=said):
        build("whisper", 16, {"model_type": "whisper", **sizes, **special, **fields})


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 96}


def test_the_class_that_a_configuration_names_is_the_one_that_is_planned() -> None:
    assert build("gpt2", 16, {**GPT2, "architectures": ["GPT2LMHeadModel"]}).splits
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification"):
        build("gpt2", 16, {**GPT2, "architectures": ["GPT2ForSequenceClassification"]})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"hidden_size": 250}, r"hidden size \(250\) is not a multiple"),
        ({"hidden_size": "big"}, "'hidden_size' expected int"),
        (
            {"model_type": "foo", "auto_map": {"AutoConfig": "its.Config"}},
            r"identifier: foo \(its author's code, auto_map, is not run: AutoConfig\)\. Write",
        ),
    ],
)
def test_a_configuration_that_makes_no_model_says_what_it_lacks(
    fields: dict[str, Any], said: str
) -> None:
    llama = {"model_type": "llama", "num_attention_heads": 8, "vocab_size": 96}
    with pytest.raises(ValueError, match=said):
        build("llama", 16, {**llama, **fields})


def test_a_configuration_of_quantized_weights_is_planned_without_and_noted() -> None:
    quantized = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    assert build("gpt2", 16, GPT2).quantized == ""
    found = trace_model("gpt2", 16, {**GPT2, "quantization_config": quantized})
    assert found.quantized == "mxfp4"


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        build(str(tmp_path), 16)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B", "llama-3-70b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
    ],
)
def test_names_of_the_hub_are_those_of_known_shapes(words: str, name: str) -> None:
    assert known_model(words) is KNOWN_MODELS[name]


def test_other_versions_are_not_taken_for_known_ones() -> None:
    """Mistral 7B v0.3 has another vocabulary."""
    assert known_model("mistralai/Mistral-7B-v0.3") is None


def test_a_configuration_in_the_hub_s_cache_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hf download owner/tiny config.json` leaves it; it wins over a known name."""
    revision = "0" * 40
    for owner in ("owner/tiny", "owner/gpt2"):
        folder = tmp_path / f"models--{owner.replace('/', '--')}"
        (folder / "snapshots" / revision).mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(revision)
        sizes = {
            "model_type": "gpt2",
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "vocab_size": 96,
        }
        (folder / "snapshots" / revision / "config.json").write_text(json.dumps(sizes))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        assert build(owner, 16).model.get_input_embeddings().weight.shape == (96, 16)


# In billions, by the models' cards: total parameters of each family's smallest, and of
# all mixtures.
PARAMETERS = {
    "llama-3.2-1b": 1.24,
    "qwen2.5-0.5b": 0.49,
    "qwen3-0.6b": 0.6,
    "gemma-2-2b": 2.61,
    "phi-3-mini": 3.8,
    "smollm2-1.7b": 1.71,
    "olmo-2-7b": 7.3,
    "mistral-small-24b": 23.6,
    "mixtral-8x7b": 46.7,
    "gpt-oss-20b": 20.9,
    "qwen3-30b-a3b": 30.5,
    "deepseek-v2-lite": 15.7,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
def test_known_models_have_the_parameters_of_their_cards(name: str) -> None:
    with FakeTensorMode():
        model = build(name, 128).model
    assert sum(each.numel() for each in model.parameters()) / 1e9 == pytest.approx(
        PARAMETERS[name], rel=0.01
    )


def test_machines_are_of_known_devices_with_peaks() -> None:
    for name, machine in MACHINES.items():
        assert Hardware.parse(f"2x{name}").device == DEVICES[machine.device]
    assert all(
        1e13 < device.flops < 1e16 and device.source for device in DEVICES.values()
    )
    assert Hardware.parse("1x8:h100").device is DEVICES["h100-80g"]
    assert Hardware.parse("8xg5").device.flops == 70e12  # an A10G, not an A10


def test_a_vocabulary_that_tensor_ranks_do_not_divide_is_padded() -> None:
    odd, even = (build("gpt2", 16, {**GPT2, "vocab_size": words}) for words in (97, 96))
    assert (len(odd.model.get_input_embeddings().weight), odd.unpadded) == (128, 97)
    assert (len(even.model.get_input_embeddings().weight), even.unpadded) == (96, 0)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("1x8:tpu-v5p", "Describe another one"),
        ("4x8:a100-40q@400gbps", r"did you mean 'a100-40g'\? Known"),
        ("4x8:h200", "how fast are the nodes connected"),
        ("4x8:h200@fast", "Gbit/s of a node"),
        ("4xp7", "unknown kind of node"),
        ("32 nodes", "NODESxDEVICES:DEVICE@RATE"),
        ("0x8:h200", "at least 1"),
        ("nowhere.yaml", "cannot read"),
    ],
)
def test_a_cluster_that_is_not_understood_says_how_one_is_written(
    cluster: str, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Hardware.parse(cluster)


def test_a_cluster_file_has_what_the_tables_lack(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("cluster: 4xp5\nprice_per_node_hour: 98\n", encoding="utf-8")
    assert Hardware.parse(path) == replace(Hardware.parse("4xp5"), price=98.0)
    device = "{name: New, memory_gib: 64, bf16_tflops: 500, hbm_gb_per_s: 2000, link_gb_per_s: 100}"
    path.write_text(
        f"nodes: 2\ndevices_per_node: 4\ngbit_per_s: 800\ndevice: {device}\n",
        encoding="utf-8",
    )
    assert (Hardware.parse(path).devices, Hardware.parse(path).device.flops) == (
        8,
        500e12,
    )
    path.write_text("cluster: 4xp5\nprice: 98\n", encoding="utf-8")
    with pytest.raises(ValueError, match="price_per_node_hour"):
        Hardware.parse(path)


def test_constants_and_the_page_are_those_of_the_result() -> None:
    """The fits are `benchmarks/planner.py`'s; bands are errors of programs that the
    constants were fitted without."""
    result = json.loads(
        Path(ROOT, "benchmarks", "results", "planner.json").read_text(encoding="utf-8")
    )
    together = result["together"]
    fitted, programs = together["fitted_on_all"], together["programs"]
    for kind, own in (("products", FITTED.products), ("attention", FITTED.attention)):
        assert own == {
            "A100": round(fitted[f"{kind}_Ampere"], 3),
            "": round(fitted[f"{kind}_Hopper"], 3),
        }
    assert (FITTED.network, FITTED.falls) == (
        round(fitted["network"], 3),
        round(fitted["falls"], 3),
    )
    assert FITTED.launching == round(fitted["launching"], 4)
    for axis, name in (
        ("sharding", "llm_foundry"),
        ("pipeline", "nanotron"),
        ("tensor", "kempner"),
    ):
        assert BANDS[axis].share == round(programs[name]["left_out_mape"], 3)
    assert MEMORY_BAND.share == round(result["kempner_memory"]["mape"], 3)
    off = [each["left_out_mape"] for each in programs.values()]
    assert f"{min(off):.1%} to {max(off):.1%} off" in Path(
        ROOT, "docs", "planning.md"
    ).read_text(encoding="utf-8")
    text = Path(ROOT, "docs", "planned-and-measured.md").read_text(encoding="utf-8")
    for each in programs.values():
        assert (
            f"| {each['rows']} | {each['mape']:.1%} | {each['left_out_mape']:.1%} |"
            in text
        )
    assert f"now by {programs['nanotron']['memory_mape']:.1%}" in text
    for each in together["ratios"]:
        assert f"| {each['measured']:.3f} | {each['planned']:.3f} |" in text
        assert each["planned"] == pytest.approx(each["measured"], rel=0.1)
    for name, each in together["loss_grows"].items():
        assert (
            f"| {name} | {fitted[name]:.3g} | {each['less']:+.1%} | {each['more']:+.1%} |"
            in text
        )
    for name in ("llm_foundry", "kempner"):
        for each in programs[name]["by_kind"].values():
            assert f"| {each['rows']} | {each['mean']:+.1%} |" in text
    unseen = together["ibm_compiled"]
    assert BANDS["compiled"].share == round(unseen["mape"], 3)
    assert f"{unseen['mape']:.1%} in the mean" in text
    text = Path(ROOT, "docs", "planner-checks.md").read_text(encoding="utf-8")
    for name in ("llm_foundry", "kempner", "vtrain"):
        judged, rows = result[name]["held_out_by_size"], result[name]["rows"]
        errors = [abs(row["held_out_error"]) for row in rows]
        assert sum(errors) / len(errors) == pytest.approx(result[name]["held_out_mape"])
        worst = max(judged, key=lambda size: judged[size]["mape"])
        assert (
            f"| {len(rows)} | {result[name]['held_out_mape']:.1%} | {judged[worst]['mape']:.1%} ({worst}) |"
            in text
        )
    assert f"| {result['lab_by_scaling_model']['mape']:.1%} |" in text
    lab = json.loads(
        Path(ROOT, "benchmarks", "results", "planner_lab.json").read_text(
            encoding="utf-8"
        )
    )
    assert all(
        f"{lab['mape'][file]:.1%}" in text for file in ("cluster", "cluster-tensor")
    )
    assert f"{lab['mape_of_stages']:.1%} with stages" in text
    for row in lab["rows"]:
        names = (
            row["measured_pick"].removeprefix("ours-"),
            row["best"].removeprefix("ours-"),
        )
        assert f"| {names[0]} | {names[1]} | {row['slower_than_best']:.1%} |" in text
    memory = result["kempner_memory"]
    assert (
        f"{memory['mape']:.1%} off on average, and {abs(memory['worst']):.1%} at the most"
        in text
    )
    runs = json.loads(
        Path(ROOT, "benchmarks", "results", "planner_dry_run.json").read_text(
            encoding="utf-8"
        )
    )
    for name, run in runs.items():
        total = sum(run["counted"].values()) / 2**30
        worst = max((off for off in run["off"].values() if off is not None), key=abs)
        assert (
            f"| {name} | {run['ranks']} | {total:.1f} | {run['off_in_all']:+.1%} | {worst:+.1%} |"
            in text
        )
    assert all(run["sent_is_equal"] for run in runs.values()) and list(runs) == list(
        CASES
    )
