"""What random programs of Trainer are made of: tiny models, data sets, collators,
callbacks and overridden methods."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import peft
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from transformers import EvalPrediction, TrainerCallback
from transformers.utils import ModelOutput

WORDS, LENGTH, FEATURES, CLASSES = 32, 8, 6, 4
# Knobs that any program or loop may have besides its layout.
MORE_KNOBS: list[dict[str, Any]] = [
    {"activations": "full"},
    {"optimizer_shard": "world"},
    {"keep_between_micro_batches": "parameters"},
    {"keep_between_micro_batches": "gradients"},
    {"reshard_after_forward": False},
    {"checkpoint": "async"},
]

# Models

_TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**_TEXT, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_TEXT, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 32},
    ),
    "bert": (
        "BertForSequenceClassification",
        "BertConfig",
        {
            **_TEXT,
            **_SIZES,
            **_NO_DROPOUT,
            "num_labels": CLASSES,
            "max_position_embeddings": 32,
        },
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": WORDS,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 2,
        }
        | {
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 2,
        },
    ),
}
DECODERS = ("gpt2", "llama")
OWN = ("dict", "tuple", "output", "counting")


@dataclass
class Answer(ModelOutput):
    """What an own model returns."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class Own(nn.Module):
    """A perceptron with tied layers, a scalar and a frozen weight, that returns its
    loss in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.into = nn.Linear(FEATURES, 10)
        self.blocks = nn.ModuleList(nn.Linear(10, 10) for _ in range(2))
        self.out = nn.Linear(10, CLASSES)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.still = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return self.answer(x, labels, None)

    def answer(self, x: torch.Tensor, labels: torch.Tensor | None, items: Any) -> Any:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden)) * self.still
        logits = self.out(hidden) * self.temperature
        loss = None
        if labels is not None and items is not None:
            loss = F.cross_entropy(logits, labels, reduction="sum") / items
        elif labels is not None:
            loss = F.cross_entropy(logits, labels)
        if self.kind == "tuple":
            return (logits,) if loss is None else (loss, logits)
        if self.kind == "output":
            return Answer(loss=loss, logits=logits)
        return {"logits": logits} if loss is None else {"loss": loss, "logits": logits}


class Counting(Own):
    """An own model that takes the number of items of the whole step, as Transformers'
    language models do."""

    def forward(
        self, x: torch.Tensor, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        return self.answer(x, labels, kwargs.get("num_items_in_batch"))


def make_model(kind: str, seed: int) -> nn.Module:
    """A model in float64; weights of 0.2, so that logits differ."""
    torch.manual_seed(seed)
    if kind in OWN:
        return (Counting if kind == "counting" else Own)(kind).double()
    model_name, config_name, options = FAMILIES[kind]
    config = getattr(transformers, config_name)(**options)
    model = getattr(transformers, model_name)(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    if kind == "t5":
        # Its loss is a mean over a rank's own targets.
        model.accepts_loss_kwargs = False
    return model


def with_lora(model: Any) -> nn.Module:
    """Adapters in float64, of which both matrices matter."""
    targets = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=targets, lora_dropout=0.0)
    ).double()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return adapted


# Data


def make_rows(
    kind: str, samples: int, lengths: str, seed: int
) -> list[dict[str, torch.Tensor]]:
    """Samples; some targets of language models are left out, so that ranks hold
    different numbers of them."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(samples):
        if kind in OWN:
            x = torch.randn(FEATURES, generator=draw, dtype=torch.float64)
            rows.append({"x": x, "labels": torch.randint(CLASSES, (), generator=draw)})
            continue
        length = (
            LENGTH
            if lengths == "fixed"
            else int(torch.randint(3, LENGTH + 1, (), generator=draw))
        )
        tokens = torch.randint(3, WORDS, (length,), generator=draw)
        row = {"input_ids": tokens}
        if lengths != "fixed":
            row["attention_mask"] = torch.ones_like(tokens)
        row["labels"] = tokens.clone()
        if kind == "bert":
            row["labels"] = torch.randint(CLASSES, (), generator=draw)
        elif kind in DECODERS:
            row["labels"][: number % 3] = -100
        rows.append(row)
    return rows


class Stream(IterableDataset):
    """Samples without a length; ``extra`` of the first ones follow, with which ranks
    would fill a last batch."""

    def __init__(self, rows: list[dict[str, torch.Tensor]], extra: int = 0) -> None:
        self.rows, self.extra = rows, extra

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from self.rows
        yield from self.rows[: self.extra]


def as_arrow(rows: list[dict[str, torch.Tensor]]) -> Any:
    """A data set of Hugging Face's, with a column that no model takes."""
    columns = {name: [row[name].tolist() for row in rows] for name in rows[0]}
    return datasets.Dataset.from_dict(
        {**columns, "source": ["a"] * len(rows)}
    ).with_format("torch")


def padding(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A collator that pads to the longest row of its batch."""
    batch = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        fill = -100 if name == "labels" else 0
        if values[0].ndim:
            batch[name] = nn.utils.rnn.pad_sequence(
                values, batch_first=True, padding_value=fill
            )
        else:
            batch[name] = torch.stack(values)
    return batch


class EveryOther(Sampler[int]):
    """Even places, then odd ones, beginning elsewhere in each epoch."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        places = [*range(0, self.samples, 2), *range(1, self.samples, 2)]
        start = self.epoch % self.samples
        yield from places[start:] + places[:start]


class OwnBatches(EveryOther):
    """Batches of a user's own sampler, whose order turns with the epoch."""

    def __init__(self, samples: int, batch_size: int, drop_last: bool) -> None:
        super().__init__(samples)
        self.batch_size, self.drop_last = batch_size, drop_last

    def __len__(self) -> int:
        return self.samples // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        places = list(super().__iter__())
        for start in range(0, self.samples - self.batch_size + 1, self.batch_size):
            yield places[start : start + self.batch_size]


class Aging(list):  # type: ignore[type-arg]
    """Rows that change with the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, place: Any) -> Any:
        row = super().__getitem__(place)
        return {**row, "x": row["x"] * (1 + self.epoch)}


class Filled(BatchSampler):
    """Batches of one process of which the last is filled from the first, as Accelerate
    fills those of several."""

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        for batch in super().__iter__():
            first = first or list(batch)
            while len(batch) < self.batch_size:
                batch = batch + first
            yield batch[: self.batch_size]


def filled(loader: DataLoader) -> DataLoader:
    if (
        type(loader.batch_sampler) is BatchSampler
        and not loader.batch_sampler.drop_last
    ):
        loader.batch_sampler.__class__ = Filled
    return loader


# Metrics


class Metrics:
    """Counts and sums of what an evaluation hands over, whole or batch by batch."""

    def __init__(self, by_batch: bool) -> None:
        self.by_batch, self.seen = by_batch, []

    def __call__(
        self, prediction: EvalPrediction, compute_result: bool = True
    ) -> dict[str, float]:
        logits, labels = (
            _arrays(part) for part in (prediction.predictions, prediction.label_ids)
        )
        kept = [_without_padding(*pair) for pair in zip(logits, labels, strict=True)]
        found = {
            "rows": sum(len(part) for part in labels),
            "logits": sum(float(part.sum()) for part in kept),
            "targets": sum(int((part != -100).sum()) for part in labels),
        }
        # By batch they are this rank's, also in stock Trainer.
        if prediction.inputs is not None and not self.by_batch:
            found["inputs"] = sum(
                float(np.where(part == -100, 0, part).sum())
                for part in _arrays(prediction.inputs)
            )
        self.seen.append(found)
        if not self.by_batch:
            self.seen = []
            return found
        if not compute_result:
            return {}
        seen, self.seen = self.seen, []
        return {name: sum(each[name] for each in seen) for name in found} | {
            "batches": len(seen)
        }


def _without_padding(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Zero logits of tokens without a label, and what Trainer fills up with."""
    if logits.shape[: labels.ndim] == labels.shape:
        of_label = (labels == -100).reshape(
            labels.shape + (1,) * (logits.ndim - labels.ndim)
        )
        logits = np.where(of_label, 0, logits)
    return np.where(logits == -100, 0, logits)


def _arrays(values: Any) -> list[np.ndarray]:
    """The first of several outputs, as arrays; not concatenated ones are several of
    them."""
    values = values[0] if isinstance(values, tuple) else values
    return [
        np.asarray(part) for part in (values if isinstance(values, list) else [values])
    ]


def largest(logits: Any, labels: Any) -> torch.Tensor:
    """A ``preprocess_logits_for_metrics``."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return logits.argmax(-1)


# Callbacks


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


EVENTS = [
    "train_begin", "epoch_begin", "step_begin", "substep_end", "pre_optimizer_step", "optimizer_step", "step_end",
    "epoch_end", "evaluate", "predict", "save", "log", "prediction_step", "train_end",
]  # fmt: skip


class Recorder(TrainerCallback):
    """Notes which callbacks are called at which step."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.numbers: dict[str, list[Any]] = {}

    def note(self, what: str, value: Any) -> None:
        self.numbers.setdefault(what, []).append(value)


def _recorded(event: str) -> Any:
    def record(self: Recorder, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append((event, state.global_step))

    return record


for _event in EVENTS:
    setattr(Recorder, f"on_{_event}", _recorded(_event))


class Writes(TrainerCallback):
    """A callback as people write them; ``recorder`` notes what it reads."""

    def __init__(self, recorder: Recorder, tokens: torch.Tensor | None = None) -> None:
        self.recorder, self.tokens = recorder, tokens


class WeightNorms(Writes):
    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        logs: Any = None,
        **_: Any,
    ) -> None:
        squares = sum(float(whole(p).square().sum()) for p in model.parameters())
        self.recorder.note("weight norm", squares**0.5)


class PlainNorms(Writes):
    """Norms as a script for one process takes them."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.recorder.note(
            "plain norm", sum(p.norm().item() ** 2 for p in model.parameters()) ** 0.5
        )

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        norms = [p.grad.norm().item() for p in model.parameters() if p.grad is not None]
        self.recorder.note("gradient norm", sum(norm**2 for norm in norms) ** 0.5)


class Flags(Writes):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            control.should_log = True
        if state.global_step == 2:
            control.should_evaluate = args.eval_strategy != "no"
            control.should_save = True


class StopsEpoch(Writes):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


class StopsTraining(Writes):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            control.should_training_stop = True


class Rates(Writes):
    def on_step_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if state.global_step == 2:
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.3
        self.recorder.note("rate", [group["lr"] for group in optimizer.param_groups])


class Halves(Writes):
    """Writes into weights, as a projection after each step does."""

    @torch.no_grad()
    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        for parameter in model.parameters():
            parameter.clamp_(-0.3, 0.3)


class Generates(Writes):
    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        was_training = model.training
        model.eval()
        with torch.no_grad():
            said = model.generate(self.tokens, max_new_tokens=3, do_sample=False)
        model.train(was_training)
        self.recorder.note("generated", said.tolist())


CALLBACKS: dict[str, type[Writes]] = {
    "weight norms": WeightNorms,
    "plain norms": PlainNorms,
    "flags": Flags,
    "stops epoch": StopsEpoch,
    "stops training": StopsTraining,
    "rates": Rates,
    "halves": Halves,
    "generates": Generates,
}


# Overridden methods


def _loss_of(outputs: Any) -> torch.Tensor:
    return outputs["loss"] if isinstance(outputs, dict) else outputs[0]


def _logits_of(outputs: Any) -> torch.Tensor:
    return outputs["logits"] if isinstance(outputs, dict) else outputs[1]


def two_losses(base: type) -> type:
    class TwoLosses(base):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
        ) -> Any:
            loss, outputs = super().compute_loss(
                model, inputs, return_outputs=True, **kwargs
            )
            loss = loss + 0.01 * _logits_of(outputs).square().mean()
            return (loss, outputs) if return_outputs else loss

    return TwoLosses


def plain_loss(base: type) -> type:
    class PlainLoss(base):
        """The model's own loss, without the number of items."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
        ) -> Any:
            outputs = model(**inputs)
            loss = _loss_of(outputs)
            return (loss, outputs) if return_outputs else loss

    return PlainLoss


def own_sum(base: type) -> type:
    class OwnSum(base):
        """A loss of the user's own, over all items of the step on all ranks."""

        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            labels = inputs["labels"]
            outputs = model(**inputs)
            logits = _logits_of(outputs)
            if logits.ndim == 3:
                logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
            if num_items_in_batch is None:
                loss = loss / labels.ne(-100).sum()
            else:
                loss = loss * self.accelerator.num_processes / num_items_in_batch
            return (loss, outputs) if return_outputs else loss

    return OwnSum


def groups(base: type) -> type:
    class Groups(base):
        def create_optimizer(self, *_: Any, **__: Any) -> Any:
            if self.optimizer is None:
                weights = [
                    p for p in self.model.parameters() if p.ndim > 1 and p.requires_grad
                ]
                others = [
                    p
                    for p in self.model.parameters()
                    if p.ndim <= 1 and p.requires_grad
                ]
                settings = [
                    {"params": weights, "weight_decay": 0.1},
                    {"params": others, "lr": 1e-3},
                ]
                self.optimizer = torch.optim.AdamW(settings, lr=self.args.learning_rate)
            return self.optimizer

    return Groups


def steps(base: type) -> type:
    class Steps(base):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            mean = self.accelerator.reduce(loss.detach().double(), "mean")
            self.recorder.note("step loss", float(mean))
            return loss

    return Steps


def predictions(base: type) -> type:
    class Predictions(base):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            loss, logits, labels = super().prediction_step(*args, **kwargs)
            first = logits[0] if isinstance(logits, tuple) else logits
            return loss, None if first is None else first * 2, labels

    return Predictions


def own_loader(base: type) -> type:
    class OwnLoader(base):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(
                self.train_dataset,
                batch_size=self.args.train_batch_size,
                collate_fn=self.data_collator,
                sampler=EveryOther(len(self.train_dataset)),
                drop_last=self.args.dataloader_drop_last,
            )
            prepared = self.accelerator.prepare(loader)
            return filled(prepared) if self.fills else prepared

    return OwnLoader


def own_schedule(base: type) -> type:
    class OwnSchedule(base):
        def create_scheduler(
            self, num_training_steps: int, optimizer: Any = None
        ) -> Any:
            if self.lr_scheduler is None:
                stepped = self.optimizer if optimizer is None else optimizer
                self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                    stepped, 0.02, total_steps=num_training_steps + 1
                )
                self._created_lr_scheduler = True
            return self.lr_scheduler

    return OwnSchedule


def per_item(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    """A ``compute_loss_func``: a sum over this rank's items, divided by those of the
    whole step."""
    logits = _logits_of(outputs)
    if logits.ndim == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
    return loss / num_items_in_batch


OVERRIDES = {
    "two losses": two_losses,
    "plain loss": plain_loss,
    "own sum": own_sum,
    "groups": groups,
    "steps": steps,
    "predictions": predictions,
    "own loader": own_loader,
    "own schedule": own_schedule,
}


def some(draw: random.Random, names: list[str], chance: float) -> list[str]:
    """Some of the names, each with this chance."""
    return [name for name in names if draw.random() < chance]
