"""`config.json` → `ModelShape`. Field names are those of Hugging Face Transformers.

Every field that is read is named here; one that is needed and missing is an error with its name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import ModelFormatError, ModelNotFound
from paceline.plan.lookup import nearest, normalise, read_table
from paceline.plan.shape import Attention, FeedForward, ModelShape

__all__ = ["find_model", "hub_id", "list_models", "shape_from_config"]

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


class _Fields:
    """Read access to a configuration that names what is missing or malformed."""

    def __init__(self, name: str, values: Mapping[str, Any]) -> None:
        self.name, self.values = name, values

    def maybe(self, *keys: str) -> Any:
        for key in keys:
            if self.values.get(key) is not None:
                return self.values[key]
        return None

    def whole(self, *keys: str) -> int:
        value = self.maybe(*keys)
        if value is None:
            raise ModelFormatError(
                f"the configuration of {self.name} has no {' or '.join(keys)}; the planner needs it to count "
                "weights and cache: give the model's own config.json"
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelFormatError(
                f"{keys[0]} in the configuration of {self.name} is {value!r}; a whole number from 1 is needed"
            )
        return value


def shape_from_config(name: str, config: Mapping[str, Any], source: str) -> ModelShape:
    """The shape a configuration describes; a nested `text_config` is the one that counts."""
    inner = config.get("text_config")
    values = {**config, **inner} if isinstance(inner, Mapping) else config
    f = _Fields(name, values)
    hidden, layers = f.whole("hidden_size"), f.whole("num_hidden_layers")
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=f.whole("vocab_size"),
        tied=bool(f.maybe("tie_word_embeddings")),
        attention=_attention(f, hidden, layers),
        feed_forward=_feed_forward(f, layers),
        source=source,
        keeps_linear_bf16=bool(f.maybe("unquantised_linear")) or f.maybe("model_type") == "gpt_oss",
        has_mtp=bool(f.maybe("num_nextn_predict_layers", "mtp_num_hidden_layers")),
    )


def _attention(f: _Fields, hidden: int, layers: int) -> tuple[Attention, ...]:
    if f.maybe("kv_lora_rank") is not None:
        return (_latent(f, hidden, layers),)
    if f.maybe("index_topk") is not None and f.maybe("o_lora_rank") is not None:
        return _compressed(f, hidden, layers)
    kinds = _layer_kinds(f, layers)
    groups = []
    if kinds.get("full"):
        groups.append(_full(f, hidden, kinds["full"], None))
    if kinds.get("window"):
        groups.append(_full(f, hidden, kinds["window"], f.whole("sliding_window")))
    if kinds.get("delta"):
        groups.append(_delta(f, hidden, kinds["delta"]))
    if kinds.get("mamba"):
        groups.append(_mamba(f, hidden, kinds["mamba"]))
    return tuple(groups)


def _layer_kinds(f: _Fields, layers: int) -> dict[str, int]:
    """How many layers are of each attention kind."""
    pattern = f.maybe("hybrid_override_pattern")
    if pattern is not None:
        return {"full": pattern.count("*"), "mamba": pattern.count("M")}
    types = f.maybe("layer_types")
    if types is not None:
        names = {"full_attention": "full", "sliding_attention": "window", "linear_attention": "delta"}
        unknown = sorted(set(types) - set(names))
        if unknown:
            raise ModelFormatError(f"{f.name} has layers of kind {unknown}; known: {sorted(names)}")
        return {names[t]: types.count(t) for t in names if t in types}
    every = f.maybe("full_attention_interval")
    if every is not None:
        return {"full": layers // every, "delta": layers - layers // every}
    period = f.maybe("sliding_window_pattern")
    if period is not None and f.maybe("sliding_window") is not None:
        return {"full": layers // period, "window": layers - layers // period}
    if f.maybe("sliding_window") is not None and f.maybe("use_sliding_window") is not False:
        return {"window": layers}
    return {"full": layers}


def _full(f: _Fields, hidden: int, layers: int, window: int | None) -> Attention:
    heads = f.whole("num_attention_heads")
    kv_heads = f.maybe("num_key_value_heads") or heads
    dim = f.maybe("head_dim") or hidden // heads
    if window is None and f.maybe("global_head_dim") is not None:
        dim, kv_heads = f.whole("global_head_dim"), f.maybe("num_global_key_value_heads") or kv_heads
    if heads % kv_heads:
        raise ModelFormatError(
            f"{f.name} has {heads} query heads over {kv_heads} key-value heads; must divide"
        )
    return Attention(
        kind="full",
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        value_dim=dim,
        row_width=2 * kv_heads * dim,
        weights=hidden * dim * (2 * heads + 2 * kv_heads),
        window=window,
    )


def _latent(f: _Fields, hidden: int, layers: int) -> Attention:
    """Multi-head latent attention (DeepSeek-V2/V3): one row of kv_lora_rank + rope numbers for all heads."""
    heads, rank = f.whole("num_attention_heads"), f.whole("kv_lora_rank")
    rope, nope, value = f.whole("qk_rope_head_dim"), f.whole("qk_nope_head_dim"), f.whole("v_head_dim")
    q_rank = f.maybe("q_lora_rank")
    q = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    weights = q + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
    selected = f.maybe("index_topk")
    return Attention(
        kind="sparse" if selected else "mla",
        layers=layers,
        heads=heads,
        kv_heads=1,
        head_dim=rank + rope,
        value_dim=rank,
        row_width=rank + rope,
        weights=weights,
        selected=selected,
    )


def _compressed(f: _Fields, hidden: int, layers: int) -> tuple[Attention, ...]:
    """Compressed sparse attention (DeepSeek-V4): a window plus `index_topk` of the compressed rows."""
    heads, dim = f.whole("num_attention_heads"), f.whole("head_dim")
    q_rank, o_rank, groups = f.whole("q_lora_rank"), f.whole("o_lora_rank"), f.whole("o_groups")
    weights = hidden * q_rank + q_rank * heads * dim + hidden * dim
    weights += heads * dim * o_rank + groups * o_rank * hidden
    ratios = f.maybe("compress_ratios") or [1] * layers
    found = []
    for ratio in sorted(set(ratios[:layers])):
        count = ratios[:layers].count(ratio)
        selected = f.whole("index_topk") if 0 < ratio <= 16 else None
        found.append(
            Attention(
                kind="sparse" if selected else "mla",
                layers=count,
                heads=heads,
                kv_heads=1,
                head_dim=dim,
                value_dim=dim,
                row_width=dim,
                weights=weights,
                window=f.maybe("sliding_window") if ratio == 0 else None,
                selected=selected,
                compression=max(1, ratio),
            )
        )
    return tuple(found)


def _delta(f: _Fields, hidden: int, layers: int) -> Attention:
    """Gated delta net: state of key width times value width for each value head."""
    k_heads, k_dim = f.whole("linear_num_key_heads"), f.whole("linear_key_head_dim")
    v_heads, v_dim = f.whole("linear_num_value_heads"), f.whole("linear_value_head_dim")
    projected = 2 * k_heads * k_dim + 2 * v_heads * v_dim + 2 * v_heads
    return Attention(
        kind="linear",
        layers=layers,
        heads=v_heads,
        kv_heads=v_heads,
        head_dim=k_dim,
        value_dim=v_dim,
        row_width=0,
        weights=hidden * projected + v_heads * v_dim * hidden,
        state_numbers=v_heads * k_dim * v_dim,
    )


def _mamba(f: _Fields, hidden: int, layers: int) -> Attention:
    heads, dim = f.whole("mamba_num_heads"), f.whole("mamba_head_dim")
    state = f.whole("ssm_state_size", "mamba_d_state")
    inner = heads * dim
    return Attention(
        kind="linear",
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=state,
        value_dim=dim,
        row_width=0,
        weights=hidden * (2 * inner + 2 * state * 8 + heads) + inner * hidden,
        state_numbers=inner * state,
    )


def _feed_forward(f: _Fields, layers: int) -> tuple[FeedForward, ...]:
    matrices = 2 if f.maybe("mlp_hidden_act") == "relu2" else 3
    pattern = f.maybe("hybrid_override_pattern")
    if pattern is not None:
        layers = pattern.count("E") + pattern.count("-")
    experts = f.maybe(*_EXPERTS)
    if not experts:
        return (FeedForward(layers, f.whole("intermediate_size"), matrices),)
    active = f.whole("num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    if active > experts:
        raise ModelFormatError(f"{f.name} activates {active} of {experts} experts; at most all can be active")
    inner = f.whole("moe_intermediate_size", "intermediate_size")
    shared = f.maybe("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size")
    if shared is None:
        shared = (f.maybe("n_shared_experts") or 0) * inner
    dense = f.maybe("first_k_dense_replace") or 0
    step = f.maybe("decoder_sparse_step", "interleave_moe_layer_step") or 1
    sparse = (layers - dense) // step
    groups = [FeedForward(sparse, inner, matrices, experts, active, shared)]
    if layers - sparse:
        groups.append(
            FeedForward(layers - sparse, f.whole("intermediate_size_mlp", "intermediate_size"), matrices)
        )
    return tuple(groups)


@functools.cache
def _known() -> tuple[dict[str, dict[str, Any]], dict[str, str], dict[str, str]]:
    raw = read_table("models.json")
    rows = {row["name"]: row for row in raw["models"]}
    aliases: dict[str, str] = {}
    for row in raw["models"]:
        for alias in [row["name"], *row["aliases"]]:
            aliases[normalise(alias)] = row["name"]
            aliases[normalise(alias.rpartition("/")[2])] = row["name"]
    return rows, aliases, raw["sources"]


def list_models() -> list[ModelShape]:
    """Every known model, in the table's order."""
    return [find_model(name) for name in _known()[0]]


def hub_id(name: str) -> str:
    """The Hugging Face id of a known model, the name itself otherwise (a folder, an id of another model)."""
    rows, aliases, _ = _known()
    if "/" in name or Path(name).exists():
        return name
    key = aliases.get(normalise(name))
    ids = [a for a in rows[key]["aliases"] if "/" in a] if key else []
    return ids[0] if ids else name


def find_model(name: str | Path) -> ModelShape:
    """The shape of a known name or alias, a `config.json`, a folder with one, or `probe:FILE`. Nothing is fetched."""
    if str(name).startswith("probe:"):
        from paceline.plan.probe_import import shape_of

        return shape_of(str(name))
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ModelNotFound(
                f"{path.parent} has no config.json; give a model folder, a config.json or a known name"
            )
    if path.is_file():
        return shape_from_config(path.parent.name or str(path), _read(path), f"{path.name} given by the user")
    rows, aliases, sources = _known()
    key = aliases.get(normalise(str(name)))
    if key is None:
        close = nearest(str(name), rows)
        offer = (
            f"nearest known: {', '.join(close)}" if close else "`paceline plan --list` shows the known ones"
        )
        raise ModelNotFound(
            f"no model {str(name)!r}: neither a file, a folder nor a known name ({offer}); "
            "for another model give its config.json"
        )
    return shape_from_config(key, rows[key]["config"], sources[rows[key]["source"]])


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"{path} is not JSON: {error.msg} at line {error.lineno}") from error
    if not isinstance(config, Mapping):
        raise ModelFormatError(f"{path} holds a {type(config).__name__}; a JSON object is needed")
    return config
