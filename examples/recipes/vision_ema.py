"""A vision transformer of a billion parameters in Lightning on two p4d: several views
of each picture, a forward for each, a loss between them, and an average of the weights
(EMA) that is sharded as they are.

    torchrun --nnodes 2 --nproc-per-node 8 ... examples/recipes/vision_ema.py
    torchrun --nproc-per-node 2 examples/recipes/vision_ema.py --tiny

The loss is SimSiam's (arXiv 2011.10566): what the predictor makes of one view is to be
near another view, which gets no gradient. Pictures are bytes of text, three channels;
views are crops with noise, the same on any number of ranks.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import Recipe, Run, Size  # isort: skip
import torch
import torch.nn.functional as F
from language_model import LanguageModel, train
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, PreTrainedConfig, ViTModel

VIEWS = 3


def _tokens(config: dict[str, Any]) -> int:
    # And the class token.
    return (config["image_size"] // config["patch_size"]) ** 2 + 1


GIANT = {
    "model_type": "vit",
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 40,
    "num_attention_heads": 24,
    "image_size": 224,
    "patch_size": 14,
}
TINY = {
    "model_type": "vit",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
RECIPE = Recipe(
    "2xp4d",
    full=Size(
        {**GIANT, **DROPOUT},
        tokens=_tokens(GIANT),
        micro_batch=32,
        global_batch=2048,
        knobs={"shard_degree": "node", "activations": "full"},
    ),
    tiny=Size(
        {**TINY, **DROPOUT},
        tokens=_tokens(TINY),
        micro_batch=4,
        global_batch=16,
        knobs={"shard_degree": "node", "activations": "full"},
        steps=8,
    ),
    lr=5e-4,
)


class Pictures(Dataset[torch.Tensor]):
    """Views of pictures, float32 [VIEWS, 3, S, S] in 0..1 and noise.

    Args:
        text: samples whose tokens are bytes of a picture, one channel after the other.
        side: S in pixels.
    """

    def __init__(self, text: Any, side: int) -> None:
        self.text, self.side = text, side

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> torch.Tensor:
        tokens = self.text[index]["input_ids"]
        random = torch.Generator().manual_seed(index)
        wide = 2 * self.side
        needed = 3 * wide * wide
        picture = (tokens.repeat(-(-needed // len(tokens)))[:needed] % 256).view(
            3, wide, wide
        ) / 255
        views = []
        for _ in range(VIEWS):
            top, left = torch.randint(self.side, (2,), generator=random).tolist()
            crop = picture[:, top : top + self.side, left : left + self.side]
            views.append(crop + 0.1 * torch.randn(crop.shape, generator=random))
        return torch.stack(views)


class Siamese(nn.Module):
    """A backbone, what it is projected to, and the predictor."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        width: int = config.hidden_size
        self.backbone = ViTModel(config, add_pooling_layer=False)
        self.projector = nn.Sequential(
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )
        self.predictor = nn.Sequential(
            nn.Linear(width, width // 2), nn.GELU(), nn.Linear(width // 2, width)
        )

    def forward(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (projections, predictions) [N, C] of pictures [N, 3, S, S]."""
        projected = self.projector(self.backbone(pictures).last_hidden_state[:, 0])
        return projected, self.predictor(projected)


def loss_between(views: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Return the mean of 1 - cosine over all ordered pairs of views."""
    pairs = itertools.permutations(views, 2)
    apart = [
        1 - F.cosine_similarity(predicted, other.detach()).mean()
        for (_, predicted), (other, _) in pairs
    ]
    return torch.stack(apart).mean()


class MultiView(LanguageModel):
    """The LightningModule: the optimizer and schedule of the other recipes, another
    model and loss."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = Siamese(self.run_of.config)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        # A forward for each, one backward.
        loss = loss_between([self.model(view) for view in batch.unbind(1)])
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss


def planned() -> Any:
    """Return the model and its batch, for `smp plan vision_ema:planned`; a batch of
    other tokens has wider pictures."""
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**RECIPE.full.model)
    # A planner has no values, which this model's initialisers ask for.
    with no_init_weights():
        model = PlannedViews(config)
    # The embeddings are no block like the others.
    model.backbone._no_split_modules = ["ViTLayer"]
    patch = config.patch_size

    def batch(samples: int, tokens: int) -> Any:
        height = config.image_size // patch
        width = max(1, (tokens - 1) // height)
        return torch.zeros(samples, VIEWS, 3, height * patch, width * patch)

    return model, batch


class PlannedViews(Siamese):
    """The step as a planner calls it: pictures of any width in, the loss out."""

    def forward(self, pictures: torch.Tensor) -> Any:
        return loss_between([self.views(view) for view in pictures.unbind(1)])

    def views(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.backbone(
            pictures, interpolate_pos_encoding=True
        ).last_hidden_state
        projected = self.projector(hidden[:, 0])
        return projected, self.predictor(projected)


def main(arguments: list[str] | None = None) -> list[float]:
    """Train, and return the loss of each optimizer step."""
    run = Run(RECIPE, RECIPE.flags(__doc__).parse_args(arguments))
    # Checkpoints hold the average.
    average = EMAWeightAveraging(decay=0.9 if run.flags.tiny else 0.999)
    return train(
        run,
        MultiView(run),
        Pictures(run.data(), run.config.image_size),
        callbacks=[average],
    )


if __name__ == "__main__":
    main()
