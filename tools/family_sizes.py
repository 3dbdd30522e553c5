"""Make a tiny random model of any family that transformers maps to a causal language model."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCABULARY = 128
LAYERS = 4

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
SPREAD = ("initializer_range", "init_std", "initializer_std")

STORED: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
SMALL = {name: int(size) for size, names in STORED["sizes"].items() for name in names.split()}
"""Name of an option in transformers' configurations -> value of the option in a tiny model."""


def _plain(value: Any) -> Any:
    """Replace the string "none" by None, because TOML has no null value."""
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return None if value == "none" else value


FAMILIES: dict[str, dict[str, Any]] = _plain(STORED["families"])
"""Name of a family -> further options of its tiny model. The key `default` has options that must be
passed to the configuration's constructor, because it fails without them."""


def small(default: Any) -> dict[str, Any]:
    """Return options that turn the configuration `default` into one of a tiny model."""
    options: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in TOKENS:
            options[name] = TOKENS[name]
        elif name in SPREAD:
            options[name] = (
                0.15  # large, so that attention weights differ, and a wrong row changes the logits
            )
        elif isinstance(value, bool) or not isinstance(value, int):
            continue
        elif name in SMALL:
            options[name] = SMALL[name]
        elif name.endswith(("_token_id", "_token_index")) and value >= VOCABULARY:
            options[name] = VOCABULARY - 1 - len(options) % 20  # ids that do not occur in prompts
    for name in default.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            options[name] = small(part)
    if "head_dim" in vars(default):
        options["head_dim"] = 16
    if "kv_lora_rank" in vars(default):  # latent attention has one KV head per query head
        options["num_key_value_heads"] = 4
    kinds = list(dict.fromkeys(vars(default).get("layer_types") or ()))
    if kinds:
        options["layer_types"] = (kinds * LAYERS)[:LAYERS]
    return options


def merged(options: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return `options` with the values of `more`, also in nested dicts. None removes an option."""
    result = dict(options)
    for name, value in more.items():
        inner = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if inner else value
    return result


def build(family: str, change: Callable[[Any], None] | None = None) -> PreTrainedModel:
    """Make a model of the family with random float32 weights from a fixed seed.

    `change` is called with the decoder's configuration before the model is made.
    """
    torch.manual_seed(0)
    own = FAMILIES.get(family, {})
    default = CONFIG_MAPPING[family](**own.get("default", {}))
    options = merged(small(default), {name: own[name] for name in own if name != "default"})
    config = AutoConfig.for_model(family, **options)
    if hasattr(config, "is_decoder") and not config.is_encoder_decoder:
        config.is_decoder = True
    if change is not None:
        change(config.get_text_config(decoder=True))
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, model_class.config_class):  # the model class takes only the text part
        config = config.get_text_config(decoder=True)
        model = model_class(config)
        model.set_attn_implementation("eager")
    else:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()
