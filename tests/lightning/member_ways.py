"""Ways to train: what people write in a LightningModule around its model, as mix-ins of
`tests.lightning.member_programs.OfMembers`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

from tests.core.blocks import WIDTH
from tests.lightning.axis_programs import VOCABULARY, errors, mean_over
from tests.lightning.running import whole


class CompiledBlocks:
    def finish(self: Any) -> None:
        self.net.blocks = nn.ModuleList(
            torch.compile(block, backend="eager") for block in self.net.blocks
        )


class CompiledInPlace:
    def finish(self: Any) -> None:
        for block in self.net.blocks:
            block.compile(backend="eager")


class CompiledNet:
    def finish(self: Any) -> None:
        self.net = torch.compile(self.net, backend="eager")


class CompiledStep:
    def finish(self: Any) -> None:
        self.loss_of = torch.compile(self.loss_of, backend="eager")


class Flips:
    """Parts are frozen and trained again in the middle of an epoch."""

    def on_train_batch_start(self: Any, batch: Any, batch_idx: int) -> None:
        self.net.blocks[0].up.requires_grad_(batch_idx % 2 == 0)
        self.net.norm.weight.requires_grad = batch_idx != 1


class Unfreezes:
    """A part that is frozen while the model is sharded."""

    def finish(self: Any) -> None:
        self.net.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            self.net.blocks[1].requires_grad_(True)


class Added:
    """A layer that comes in the second epoch."""

    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            made = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
            for number, parameter in enumerate(made.parameters()):
                nn.init.constant_(parameter, 0.1 + 0.1 * number)
            self.net.extra = made
            self.net.norm.register_forward_hook(
                lambda module, args, output: output + self.net.extra(output)
            )
            self.optimizers().add_param_group({"params": list(made.parameters())})


class Replaced:
    """A head of new values, as for another task."""

    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            generator = torch.Generator().manual_seed(3)
            value = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
            self.net.norm.bias = nn.Parameter(value)
            self.optimizers().add_param_group({"params": [self.net.norm.bias]})


class Resets:
    @torch.no_grad()
    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(11)
            self.net.blocks[0].up.reset_parameters()
            nn.init.orthogonal_(self.net.blocks[1].down.weight)


class GradientHooks:
    def finish(self: Any) -> None:
        self.net.front.weight.register_hook(lambda gradient: gradient * 0.5)
        self.net.blocks[0].up.weight.register_hook(
            lambda gradient: gradient.clamp(-0.01, 0.01)
        )
        self.net.blocks[1].register_full_backward_hook(
            lambda module, inputs, outputs: tuple(
                None if each is None else each * 0.7 for each in inputs
            )
        )


def halve(parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


class SteppedInBackward:
    """Sums of gradients as they come."""

    def finish(self: Any) -> None:
        for parameter in self.net.blocks[1].parameters():
            parameter.register_post_accumulate_grad_hook(halve)


class SeveralBackwards:
    """Three backward passes of a step, two of them of one graph."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        scores = self.net(tokens)
        self.manual_backward(
            mean_over(errors(scores, targets), targets), retain_graph=True
        )
        self.manual_backward(0.01 * mean_over(scores.square().mean(-1), targets))
        self.manual_backward(self.loss_of(tokens.flip(0), targets.flip(0)))
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        self.noted(scores.mean())


class Sharpness:
    """Sharpness-aware steps: gradients, a step uphill by their norm, gradients there,
    back, step."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss_of(tokens, targets)
        self.manual_backward(loss)
        with torch.no_grad():
            trained = [each for each in self.net.parameters() if each.grad is not None]
            norm = torch.stack([each.grad.norm() for each in trained]).norm() + 1e-12
            uphill = [0.1 * each.grad / norm for each in trained]
            for each, way in zip(trained, uphill, strict=True):
                each.add_(way)
        optimizer.zero_grad()
        self.manual_backward(self.loss_of(tokens, targets))
        with torch.no_grad():
            for each, way in zip(trained, uphill, strict=True):
                each.sub_(way)
        optimizer.step()
        self.noted(loss)


class ClosureByHand:
    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = self.loss_of(tokens, targets)
            self.manual_backward(loss)
            return loss

        loss = optimizer.step(closure=closure)
        self.noted(loss)


class Quasi:
    """LBFGS, which takes products over all gradients at once."""

    def optimizer_of(self: Any, parameters: Any, lr: float = 0.1) -> Any:
        return torch.optim.LBFGS(parameters, lr=lr, max_iter=3, history_size=4)


class QuasiSearching:
    def optimizer_of(self: Any, parameters: Any, lr: float = 0.1) -> Any:
        return torch.optim.LBFGS(
            parameters, lr=lr, max_iter=3, line_search_fn="strong_wolfe"
        )


class Bootstrapped:
    """A target network that follows the trained one (BYOL)."""

    def finish(self: Any) -> None:
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.no_grad():
            aim = self.target(tokens)
        scores = self.net(tokens)
        distance = (scores - aim).square().mean(-1)
        return mean_over(errors(scores, targets) + 0.1 * distance, targets)

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        with torch.no_grad():
            for slow, fast in zip(
                self.target.parameters(), self.net.parameters(), strict=True
            ):
                slow.lerp_(fast, 0.1)


class BootstrappedData(Bootstrapped):
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super(Bootstrapped, self).on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        for slow, fast in zip(
            self.target.parameters(), self.net.parameters(), strict=True
        ):
            slow.data = 0.9 * slow.data + 0.1 * fast.data


class TwoShapes:
    """The model sees all of a batch, and a part of its tokens."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        first = mean_over(errors(self.net(tokens), targets), targets)
        part = mean_over(
            errors(self.net(tokens[:, :4]), targets[:, :4]), targets[:, :4]
        )
        return first + 0.5 * part


class TwoCalls:
    """One call without gradients, then two with."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        with torch.no_grad():
            aim = self.net((tokens + 1) % VOCABULARY)
        scores = self.net(tokens) + 0.5 * self.net((tokens + 2) % VOCABULARY)
        distance = (scores - aim).square().mean(-1)
        return mean_over(errors(scores, targets) + 0.1 * distance, targets)


class Weighted:
    """Weights of classes in a buffer."""

    def finish(self: Any) -> None:
        generator = torch.Generator().manual_seed(4)
        weights = 0.5 + torch.rand(VOCABULARY, generator=generator)
        self.register_buffer("classes", weights)

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        scores = self.net(tokens)
        each = F.cross_entropy(
            scores.flatten(0, 1),
            targets.flatten(),
            weight=self.classes,
            reduction="none",
            label_smoothing=0.1,
        )
        return mean_over(each.view(targets.shape), targets)


class Penalised:
    """The weights' own norm in the loss."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        norms = sum(each.square().sum() for each in self.net.parameters())
        return mean_over(errors(self.net(tokens), targets), targets) + 1e-3 * norms


class Lasso:
    """The first matrices' sums, and a product of two."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        up, down = self.net.blocks[0].up.weight, self.net.blocks[0].down.weight
        more = up.abs().sum() + (down @ up).square().mean() + up.norm(dim=1).max()
        return mean_over(errors(self.net(tokens), targets), targets) + 1e-2 * more


class GradientPenalty:
    """A loss of gradients with respect to embedded tokens."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        kept: list[torch.Tensor] = []
        handle = self.net.front.register_forward_hook(
            lambda module, args, output: kept.append(output)
        )
        with sdpa_kernel(SDPBackend.MATH):
            scores = self.net(tokens)
        handle.remove()
        (gradient,) = torch.autograd.grad(
            scores.square().sum(), kept[0], create_graph=True
        )
        return mean_over(
            errors(scores, targets) + 1e-2 * gradient.square().sum(-1), targets
        )


class ClipsByTorch:
    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
        self.log("norm", float(norm))


class ClipsValuesByTorch:
    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.003)


class ClipsInPlaceOfLightning:
    def configure_gradient_clipping(
        self: Any,
        optimizer: Any,
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Clamps:
    """Weights between bounds, behind each step."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        for parameter in self.net.parameters():
            parameter.data.clamp_(-0.3, 0.3)


class Noisy:
    @torch.no_grad()
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        torch.manual_seed(batch_idx)
        for parameter in self.net.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))


class Vectors:
    """All weights as one vector, and back."""

    @torch.no_grad()
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        vector = torch.nn.utils.parameters_to_vector(self.net.parameters())
        torch.nn.utils.vector_to_parameters(0.99 * vector, self.net.parameters())


class NewOptimizer:
    """Another optimizer for the second epoch."""

    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]


class SetUpOptimizers:
    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            self.program = {**self.program, "optimizer": "SGD"}
            self.trainer.strategy.setup_optimizers(self.trainer)


class ForgetsStates:
    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            self.optimizers().state.clear()


class ScalesStates:
    """What people do to an optimizer's states."""

    @torch.no_grad()
    def on_train_epoch_start(self: Any) -> None:
        if self.current_epoch == 1:
            for state in self.optimizers().state.values():
                for value in state.values():
                    if torch.is_tensor(value) and value.ndim:
                        value.mul_(0.5)


class OfSome:
    """Parameters that no optimizer has."""

    def configure_optimizers(self: Any) -> Any:
        trained = [
            each
            for name, each in self.named_parameters()
            if "blocks.0" not in name and "scale" not in name
        ]
        return self.optimizer_of(trained)


class ByName:
    """A group for each kind of parameter."""

    def configure_optimizers(self: Any) -> Any:
        plain = [each for each in self.parameters() if each.ndim < 2]
        matrices = [each for each in self.parameters() if each.ndim >= 2]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0, "lr": 0.05},
        ]
        return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


class Copies:
    """Keeps the whole model and evaluates the copy."""

    def on_train_epoch_end(self: Any) -> None:
        kept = copy.deepcopy(self.net)
        self.seen.append(
            ("copy", float(sum(float(whole(p).sum()) for p in kept.parameters())))
        )


class EvaluatesInTraining:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        self.net.eval()
        with torch.no_grad():
            parallel = getattr(self.trainer.strategy, "parallel", None)
            tokens = torch.arange(8).view(1, 8) % VOCABULARY
            scores = parallel.call(self.net, tokens) if parallel else self.net(tokens)
        self.net.train()
        self.seen.append(("score", float(scores.sum())))


class ReadsStates:
    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        total = 0.0
        for state in self.optimizers().state.values():
            for name, value in state.items():
                if name == "exp_avg":
                    total += float(value.norm()) ** 2
        self.seen.append(("states", total**0.5))


class Buffered:
    """A buffer of the module that follows what all ranks know alike."""

    def finish(self: Any) -> None:
        self.register_buffer("ages", torch.zeros(3))

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)  # type: ignore[misc]
        self.ages += batch_idx
        self.ages = self.ages * 0.5
        self.seen.append(("ages", float(self.ages.sum())))


class Workers:
    def loader(self: Any, samples: int, seed: int, is_training: bool = False) -> Any:
        made = super().loader(samples, seed, is_training)  # type: ignore[misc]
        return DataLoader(
            made.dataset,
            batch_size=made.batch_size,
            sampler=made.sampler
            if torch.distributed.is_initialized() is False
            else None,
            num_workers=1,
            persistent_workers=True,
            prefetch_factor=2,
        )


class OwnWeights:
    """Parameters of the LightningModule itself."""

    def finish(self: Any) -> None:
        generator = torch.Generator().manual_seed(4)
        self.temperature = nn.Parameter(
            torch.rand(VOCABULARY, generator=generator, dtype=torch.float64)
        )

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        scores = self.net(tokens) * self.temperature
        return mean_over(errors(scores, targets), targets)


class Alternates:
    """Trains parts by turns."""

    def on_train_epoch_start(self: Any) -> None:
        first = self.current_epoch % 2 == 0
        self.net.blocks.requires_grad_(first)
        self.net.norm.requires_grad_(not first)


class SkipsSteps:
    """Returns nothing for some batches."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)  # type: ignore[misc]
        return None if batch_idx == 1 else loss


class NotedFinder(LearningRateFinder):
    """Notes the losses that the finder has looked at."""

    def lr_find(self, trainer: Any, pl_module: Any) -> None:
        super().lr_find(trainer, pl_module)
        assert self.optimal_lr is not None
        losses = self.optimal_lr.results["loss"]
        pl_module.seen += [("loss of the finder", float(each)) for each in losses]


class FindsRates:
    lr = 0.02

    def configure_optimizers(self: Any) -> Any:
        return self.optimizer_of(self.parameters(), self.lr)

    def configure_callbacks(self: Any) -> list[Any]:
        return [NotedFinder(0.001, 0.1, 6, early_stop_threshold=None)]


class FindsBatches:
    batch_size = 1

    def configure_callbacks(self: Any) -> list[Any]:
        return [BatchSizeFinder(max_trials=1, steps_per_trial=2, init_val=4)]


class OptimizerOfItsOwn:
    """An optimizer that Lightning never sees."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        if not hasattr(self, "mine"):
            self.mine = torch.optim.AdamW(self.net.parameters(), lr=0.02, eps=1e-3)
        self.mine.zero_grad()
        loss = self.loss_of(tokens, targets)
        self.manual_backward(loss)
        self.mine.step()
        self.noted(loss)


class StepsWeights:
    """Gradient descent without an optimizer."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        loss = self.loss_of(tokens, targets)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter in self.net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        self.noted(loss)


class GradientsByHand:
    """torch.autograd.grad, whose results become gradients."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        loss = self.loss_of(tokens, targets)
        trained = [each for each in self.net.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        self.noted(loss)


class PlainBackward:
    """backward() of the loss itself, in place of `manual_backward`."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        self.noted(loss)


class InnerSteps:
    """Several steps on one batch (PPO, TTT)."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        before = None
        for _ in range(3):
            scores = self.net(tokens)
            if before is None:
                before = scores.detach()
            ratio = (scores - before).exp().clamp(0.8, 1.2).mean(-1)
            loss = mean_over(errors(scores, targets) * ratio, targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.noted(loss)


class Meta:
    """Weights go back to the mean of where they were and where they came (Reptile)."""

    automatic_optimization_is = False

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        optimizer = self.optimizers()
        begun = {
            name: value.detach().clone() for name, value in self.net.named_parameters()
        }
        for _ in range(2):
            loss = self.loss_of(tokens, targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.noted(loss)
        with torch.no_grad():
            for name, value in self.net.named_parameters():
                value.copy_(begun[name] + 0.5 * (value - begun[name]))


class LoadsBack:
    """The state of the model as it was, kept in memory, when an epoch ends."""

    def on_train_epoch_start(self: Any) -> None:
        self.kept = {
            name: whole(value) if torch.is_tensor(value) else value
            for name, value in self.net.state_dict().items()
        }

    def on_train_epoch_end(self: Any) -> None:
        if self.current_epoch == 0:
            self.net.load_state_dict(self.kept)
            self.net.norm.load_state_dict(
                {
                    "weight": 0 * self.kept["norm.weight"] + 2,
                    "bias": self.kept["norm.bias"],
                }
            )


class Probes:
    """Forward hooks that keep and change activations."""

    def finish(self: Any) -> None:
        self.kept: list[torch.Tensor] = []
        self.net.blocks[0].register_forward_hook(
            lambda module, args, output: self.kept.append(output) or output * 1.1
        )
        self.net.blocks[1].register_forward_pre_hook(
            lambda module, args: (args[0] + 0.1,)
        )

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        self.kept.clear()
        values = errors(self.net(tokens), targets)
        return mean_over(values + 0.1 * self.kept[0].square().mean(-1), targets)


class Hidden:
    """A loss of a block's output, and one of the weights that the head shares."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        x = self.net.front(tokens)
        for block in self.net.blocks:
            x = block(x)
        scores = self.net.back(self.net.norm(x)) * self.net.scale
        return mean_over(errors(scores, targets) + x.square().mean(-1), targets)


class TwoLosses:
    """Of parts that share a trunk, by turns."""

    def loss_of(self: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
        if self.global_step % 2:
            x = self.net.blocks[0](self.net.front(tokens))
            return mean_over(x.square().mean(-1), targets)
        return mean_over(errors(self.net(tokens), targets), targets)


class Schedules:
    """Two optimizers over parts, each stepped at its own pace."""

    automatic_optimization_is = False

    def configure_optimizers(self: Any) -> Any:
        first = list(self.net.blocks.parameters())
        ids = {id(each) for each in first}
        others = [each for each in self.net.parameters() if id(each) not in ids]
        return [self.optimizer_of(first), torch.optim.SGD(others, lr=0.1)]

    def step_by_hand(self: Any, batch: Any, batch_idx: int) -> None:
        tokens, targets = batch
        first, second = self.optimizers()
        loss = self.loss_of(tokens, targets)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 2:
            self.clip_gradients(second, 0.1, "norm")
            second.step()
            second.zero_grad()
        self.noted(loss)


WAYS: dict[str, type] = {
    "compiled blocks": CompiledBlocks,
    "compiled in place": CompiledInPlace,
    "compiled net": CompiledNet,
    "compiled step": CompiledStep,
    "flips": Flips,
    "unfreezes": Unfreezes,
    "added": Added,
    "replaced": Replaced,
    "resets": Resets,
    "gradient hooks": GradientHooks,
    "hooks behind gradients": SteppedInBackward,
    "several backwards": SeveralBackwards,
    "sharpness": Sharpness,
    "closure by hand": ClosureByHand,
    "lbfgs": Quasi,
    "lbfgs, searching": QuasiSearching,
    "bootstrapped": Bootstrapped,
    "bootstrapped by data": BootstrappedData,
    "two shapes": TwoShapes,
    "two calls": TwoCalls,
    "weighted classes": Weighted,
    "penalised": Penalised,
    "lasso": Lasso,
    "gradient penalty": GradientPenalty,
    "clips by torch": ClipsByTorch,
    "clips values by torch": ClipsValuesByTorch,
    "clips in place of Lightning": ClipsInPlaceOfLightning,
    "clamps": Clamps,
    "noisy": Noisy,
    "vectors": Vectors,
    "new optimizer": NewOptimizer,
    "sets up optimizers": SetUpOptimizers,
    "forgets states": ForgetsStates,
    "scales states": ScalesStates,
    "of some": OfSome,
    "by name": ByName,
    "copies": Copies,
    "evaluates in training": EvaluatesInTraining,
    "reads states": ReadsStates,
    "buffered": Buffered,
    "workers": Workers,
    "own weights": OwnWeights,
    "alternates": Alternates,
    "skips steps": SkipsSteps,
    "finds rates": FindsRates,
    "optimizer of its own": OptimizerOfItsOwn,
    "steps weights": StepsWeights,
    "gradients by hand": GradientsByHand,
    "plain backward": PlainBackward,
    "inner steps": InnerSteps,
    "meta": Meta,
    "loads back": LoadsBack,
    "probes": Probes,
    "hidden": Hidden,
    "two losses": TwoLosses,
    "two paces": Schedules,
}
