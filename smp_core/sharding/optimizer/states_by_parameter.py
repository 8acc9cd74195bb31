"""An optimizer's states where it steps masters: code finds, sets and takes away the
state of a parameter by the parameter (``optimizer.state[p] = {}``), as in one process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from smp_core.sharding.optimizer.gradient_readers import say_of_states


class StatesByParameter(defaultdict[Any, Any]):
    """States by what an optimizer steps, in which a model's parameter stands for what
    is stepped in its place.

    Args:
        stepped: returns what is stepped in the place of parameters.
        part: returns this rank's part of a state that is like a parameter's.
        states: those that the optimizer has, by master or by parameter.
    """

    def __init__(
        self,
        stepped: Callable[[Sequence[Tensor]], list[Tensor]],
        part: Callable[[Tensor, Any], Any],
        states: Any,
    ) -> None:
        super().__init__(dict)
        self._stepped, self._part = stepped, part
        self.update(states)

    def _found(self, parameter: Any) -> Any:
        # What an optimizer steps is found at once.
        if super().__contains__(parameter) or not isinstance(parameter, Tensor):
            return parameter
        return self._stepped([parameter])[0]

    def __getitem__(self, parameter: Any) -> Any:
        stepped = self._found(parameter)
        if stepped is not parameter:
            say_of_states()
        return super().__getitem__(stepped)

    def __setitem__(self, parameter: Any, entry: Any) -> None:
        stepped = self._found(parameter)
        # What was made like the parameter is cut as the parameter is.
        if stepped is not parameter and entry:
            entry = self._part(parameter, entry)
        super().__setitem__(stepped, entry)

    def __delitem__(self, parameter: Any) -> None:
        super().__delitem__(self._found(parameter))

    def __contains__(self, parameter: Any) -> bool:
        return super().__contains__(self._found(parameter))

    def get(self, parameter: Any, default: Any = None) -> Any:
        return super().get(self._found(parameter), default)

    def pop(self, parameter: Any, *default: Any) -> Any:
        return super().pop(self._found(parameter), *default)

    def update(self, states: Any = (), /, **named: Any) -> None:
        for parameter, entry in {**dict(states), **named}.items():
            self[parameter] = entry

    def setdefault(self, parameter: Any, default: Any = None) -> Any:
        if parameter not in self:
            self[parameter] = default
        return self[parameter]

    # Pickled and copied as the dict that torch makes, without the models behind it.
    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())
