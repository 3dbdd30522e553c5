"""`LayerOptions`: the options of `attach`, and a method that creates the index and the attention
layer of each model layer from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import kvindex
from kvindex.core.config import parse_spec
from kvindex.core.geometry import Geometry
from kvindex.core.protocol import KVIndex
from kvindex.layer import AttentionLayer
from kvindex.layer.arguments import DEFAULT_K
from kvindex_adapters.common.placement import default_placement

IndexFactory = Callable[..., KVIndex]
"""A function that makes an index from the keyword arguments of `kvindex.create`, without a name."""

OF_SINGLE_LAYERS = {"dense_layers", "layer_options"}
"""Options of `attach` that name single layers of a model. A draft model has other layers."""

Ropes = dict[int, Tensor | None]
"""Maps the number of each model layer that gets an index to its inverse rotary frequencies `[F]`,
or to None if they are unknown."""


@dataclass(frozen=True, eq=False)
class LayerOptions:
    """The options of `kvhf.attach`. See its docstring for the meaning of each.

    Raises:
        ValueError: `index` is neither a name nor a factory, `index_options` or `layer_options` is
            not a mapping, or one of them sets a size that the model determines, such as `head_dim`.
    """

    index: str | IndexFactory = "pariskv"
    k: int | str = DEFAULT_K
    coverage: float | None = None
    error: float | None = None
    sink: int = 64
    local_window: int = 256
    update_every: int = 256
    dense_below: int = 2048
    search_up_to: int = 1
    dense_layers: Sequence[int] = ()
    index_options: Mapping[str, Any] | None = None
    layer_options: Mapping[int, Mapping[str, Any]] | None = None
    layer: type[AttentionLayer] = AttentionLayer
    graphs: bool = True
    prefill: str = "dense"
    prefill_mass: float = 0.95
    prefill_last: int = 128
    prefill_selector: str = "sampled"

    def __post_init__(self) -> None:
        _check_options(self.index, self.index_options, self.layer_options)

    def make(self, ropes: Ropes, number: int, **geometry: Any) -> AttentionLayer:
        """Make the attention layer for one model layer, with a new index inside.

        A layer passes new tokens to its index every `update_every` decode steps. To spread this
        work over the steps, the schedule of the `i`-th of `n` layers is shifted by `update_every *
        i / n` steps.

        Args:
            ropes: Inverse rotary frequencies of all model layers that get an index.
            number: Number of the model layer.
            **geometry: Keyword arguments of `Geometry`, such as `head_dim` and `device`.
        """
        layer_index = self._make_index(ropes[number], number, geometry)
        return self.layer(
            layer_index,
            k=self.k,
            coverage=self.coverage,
            sink=self.sink,
            local_window=self.local_window,
            update_every=self.update_every,
            dense_below=self.dense_below,
            search_up_to=self.search_up_to,
            update_phase=list(ropes).index(number) / len(ropes),
            graphs=self.graphs,
            **self._seldom_given(),
        )

    def _seldom_given(self) -> dict[str, Any]:
        """Return those options of prompts and errors that differ from the defaults.

        A layer class of the caller need not know these options.
        """
        names = "error", "prefill", "prefill_mass", "prefill_last", "prefill_selector"
        given, defaults = vars(self), vars(LayerOptions)
        return {name: given[name] for name in names if given[name] != defaults[name]}

    def probe(self, ropes: Ropes, geometry: Callable[[int], dict[str, Any]]) -> list[KVIndex]:
        """Make a few trial indexes, so that wrong options raise an error before the model runs.

        There is a trial index for each layer in `layer_options`, and for one layer without options
        of its own.

        Args:
            ropes: Inverse rotary frequencies of all model layers that get an index.
            geometry: Function that returns the keyword arguments of `Geometry` for a layer number.

        Returns:
            The trial indexes, for further checks.

        Raises:
            ValueError: A key of `layer_options` is not the number of a layer with an index, or an
                index does not accept its options.
        """
        configured = set(self.layer_options or {})
        if not configured <= ropes.keys():
            raise ValueError(
                f"layer_options: got layers {sorted(configured - ropes.keys(), key=str)}; "
                f"allowed are the layers with an index, {sorted(ropes)}"
            )
        usual = min(ropes, key=lambda number: ropes[number] is not None)
        numbers = {usual, *configured}
        return [self.make(ropes, number, **geometry(number)).index for number in numbers]

    def _make_index(self, rope: Tensor | None, number: int, geometry: dict[str, Any]) -> KVIndex:
        options = {**(self.index_options or {}), **(self.layer_options or {}).get(number, {})}
        device = geometry.get("device", "cpu")
        if rope is not None:
            geometry = {**geometry, "rope": rope.to(device)}
        if not isinstance(self.index, str):
            return self.index(**{**geometry, **options})
        placement = default_placement(geometry.get("device"), self.index, options)
        return kvindex.create(self.index, **{**placement, **geometry, **options})


def _check_options(index: object, index_options: object, layer_options: object) -> None:
    """Raise ValueError if `index` is neither a name nor a factory, or options are not mappings."""
    if not isinstance(layer_options, Mapping | None):
        raise ValueError(
            f"layer_options: got {layer_options!r}, allowed is a mapping from layer numbers to "
            "mappings of options"
        )
    named = {f"layer_options[{i!r}]": options for i, options in (layer_options or {}).items()}
    for name, options in {"index_options": index_options, **named}.items():
        if not isinstance(options, Mapping | None):
            raise ValueError(
                f"{name}: got {options!r}, allowed is a mapping from option names to values"
            )
        check_spec(index, options)


def check_spec(index: object, index_options: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if `index` is neither a name nor a factory, or if an option sets a field of
    `Geometry`."""
    names = set(index_options or {})
    if isinstance(index, str):
        names |= set(parse_spec(index.partition("+")[0])[1])
    elif not callable(index):
        raise ValueError(
            f"index: got {index!r}, allowed is the name of an index, a name with options "
            "(name:option=value:…), or a function that makes an index"
        )
    decided = names & {field.name for field in dataclasses.fields(Geometry)}
    if decided:
        raise ValueError(
            f"index_options: got {', '.join(sorted(decided))}, but the model determines these; "
            "allowed are the index's own options, preset, store, row_codec, backend, "
            "device_fraction and check"
        )
