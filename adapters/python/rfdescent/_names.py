"""Tensors of a saved state by their names, where both the state and the optimizer have names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._warn import warn

__all__ = ["in_order_of"]

Group = Mapping[str, Any]


def in_order_of(groups: Sequence[Group], state: dict[str, Any], strict: bool = True) -> dict[str, Any]:
    """A loaded state with its groups and their parameters in the order of the optimizer's groups.

    By position, as it is, where one of the two has no names. The names that the optimizer was given stay.
    ValueError names the tensors that only one of the two has; without `strict` a warning does.
    """
    _check_form(state)
    # None is as good as no names.
    saved = [
        {key: value for key, value in group.items() if (key, value) != ("param_names", None)}
        for group in state["param_groups"]
    ]
    state = {**state, "param_groups": saved}
    if not strict:
        if _names(groups) is None or _names(saved) is None:
            raise ValueError(
                "strict=False finds parameters by name, which the optimizer or the state does not have: make "
                "the optimizer, of which it is a state too, from model.named_parameters()"
            )
        return {**state, "param_groups": _what_fits(groups, saved)}
    if _names(groups) is None:
        return state
    # torch.distributed.checkpoint has found each parameter by its name, which stands in place of its number.
    numbered = all(isinstance(key, int) for group in saved for key in group["params"])
    if numbered and _names(saved) is not None:
        saved = _arranged(groups, saved)
    elif [len(group["params"]) for group in saved] != [len(group["params"]) for group in groups]:
        # PyTorch's error.
        return state
    given = [
        {**group, "param_names": list(own["param_names"])} if "param_names" in own else group
        for own, group in zip(groups, saved)
    ]
    return {**state, "param_groups": given}


def _check_form(state: Any) -> None:
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not (
        isinstance(groups, Sequence)
        and isinstance(state.get("state"), Mapping)
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups)
    ):
        raise ValueError(
            "the state is no optimizer's: it must be a dict with `state` and `param_groups`, as state_dict() "
            "gives it"
        )


def _names(groups: Sequence[Group]) -> list[str] | None:
    """Those of all parameters; None where one has none, or two have the same."""
    names: list[str] = []
    for group in groups:
        own = group.get("param_names", [])
        if len(own) != len(group["params"]):
            return None
        names += own
    return names if len(set(names)) == len(names) else None


def _differences(groups: Sequence[Group], saved: Sequence[Group]) -> str:
    """What the state lacks and what it has beside the optimizer's tensors; empty without either."""
    own = [name for group in groups for name in group.get("param_names", [])]
    theirs = [name for group in saved for name in group.get("param_names", [])]
    parts = (
        ("lacks", [name for name in own if name not in set(theirs)]),
        ("additionally has", sorted(set(theirs) - set(own))),
    )
    return " and ".join(f"{what} {_listed(names)}" for what, names in parts if names)


def _what_fits(groups: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    """The optimizer's groups with the keys of a state, or other keys for tensors that it does not have."""
    if differences := _differences(groups, saved):
        warn(f"the state {differences}; what fits is loaded")
    keys = {
        name: (key, group)
        for group in saved
        for name, key in zip(group.get("param_names", []), group["params"])
    }
    fitting = []
    for group in groups:
        names = group.get("param_names", [])
        sources = {id(keys[name][1]): keys[name][1] for name in names if name in keys}
        settings = next(iter(sources.values())) if len(sources) == 1 else group
        own = [keys[name][0] if name in keys else f"without a state: {name}" for name in names]
        fitting.append({**settings, "params": own, "param_names": list(names)})
    return fitting


def _arranged(groups: Sequence[Group], saved: Sequence[Group]) -> list[dict[str, Any]]:
    home = {name: index for index, group in enumerate(saved) for name in group.get("param_names", [])}
    if differences := _differences(groups, saved):
        raise ValueError(
            f"the state {differences}; load it into an optimizer for the same parameters, take param_names "
            "out of its groups, to go by position, or load what fits with strict=False"
        )
    arranged = []
    for index, group in enumerate(groups):
        names = group.get("param_names", [])
        # Those of an empty group are not known by their tensors.
        sources = {home[name] for name in names} or {index}
        if len(sources) > 1:
            one, other = (
                next(name for name in names if home[name] == source) for source in list(sources)[:2]
            )
            raise ValueError(
                f"param_groups[{index}] has `{one}` and `{other}`, which are in different groups in the "
                "state; load it into an optimizer with the same groups"
            )
        (source,) = sources
        if source >= len(saved) or len(saved[source]["params"]) != len(names):
            raise ValueError(
                f"param_groups[{index}] has other parameters than that group in the state; load it into an "
                "optimizer with the same groups"
            )
        keys = dict(zip(saved[source].get("param_names", []), saved[source]["params"]))
        arranged.append({**saved[source], "params": [keys[name] for name in names]})
    return arranged


def _listed(names: Sequence[str]) -> str:
    """The first few."""
    shown = ", ".join(f"`{name}`" for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
