"""FP8 layers of other libraries, behind the same recipe.

``backend="torchao"``: the modules that the native backend would choose (``nn.Linear`` only) become torchao's
``Float8Linear`` with dynamic tensorwise scaling. Its layers keep no state between steps, so nothing is stepped or
saved; weights travel in the parameters' dtype, because torchao's FP8 all-gather turns parameters into tensor
subclasses that state dicts would show.

``backend="transformer_engine"`` is refused: its layers exchange amaxes once per micro-batch inside a context around the
outermost forward, which a LightningModule's ``training_step`` does not have.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from torch import nn

from smp_core.fp8.convert import choose
from smp_core.fp8.recipe import Fp8Recipe


def convert_with(model: nn.Module, recipe: Fp8Recipe) -> Mapping[str, str]:
    """Give ``model`` the FP8 layers of ``recipe.backend``, in place; before it is sharded.

    Returns:
        module name -> reason, of every module with a matrix product that stays as it is.

    Raises:
        ValueError: the library is not installed (what to install is named), or the backend cannot do this.
    """
    if recipe.backend == "transformer_engine":
        raise ValueError(
            "fp8: backend='transformer_engine' is not built yet; backend='native' has the same recipe "
            "(delayed scaling, amax_history_len, amax_compute_algo, margin)"
        )
    assert recipe.backend == "torchao", recipe.backend
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(
            "fp8: backend='torchao' needs a package that is not installed: pip install torchao; or write "
            "backend='native'"
        )
    from torchao.float8 import convert_to_float8_training

    chosen, left_out = choose(model, recipe)
    names = {name for name, module, _ in chosen if type(module) is nn.Linear}
    left_out |= {name: "torchao converts nn.Linear only" for name, *_ in chosen if name not in names}
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names)
    return left_out
