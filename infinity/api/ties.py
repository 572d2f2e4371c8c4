"""Names that share one parameter: which of them a file leaves out, and what config.json says of them.

[Note: ties in files] transformers reads from a model's configuration which names it ties. If the files lack
one of two such names, `from_pretrained` ties it to the other. So the files may lack a name only if its source
has the same values there. If the values of two such names differ, the configuration has to say that nothing
is tied, and the files have every name. Models with an encoder and a decoder keep their setting: some of them
(T5, Switch) scale their outputs by it, and transformers does not tie names that it finds with different
values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from infinity.params.param import plain_name

TIED: Final = "tie_word_embeddings"  # the setting of transformers


def contents_of(model: nn.Module) -> dict[str, object]:
    """Return a key for the values of each name of a parameter: equal for names that share one."""
    return {plain_name(name): id(p) for name, p in model.named_parameters(remove_duplicate=False)}


def declared(model: Any) -> dict[str, str] | None:
    """Return which names transformers ties when it loads the model by its configuration: name → the source.
    None: the model is of another library, or of an older version of it."""
    expand = getattr(model, "get_expanded_tied_weights_keys", None)
    if not callable(expand):
        return None
    found: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    with contextlib.suppress(ValueError):  # adapters have put the names that a pattern looks for elsewhere
        found = expand(all_submodels=True)
    plain = ((_without_adapters(target), _without_adapters(source)) for target, source in found.items())
    return {target: source for target, source in plain if target != source}


def _without_adapters(name: str) -> str:
    return plain_name(name).replace(".base_layer.", ".")


def contradicts(model: Any, contents: Mapping[str, object]) -> bool:
    """Return whether a model's configuration says of two names that they are tied, and they are not."""
    pairs = declared(model) or {}
    return any(t in contents and s in contents and contents[t] != contents[s] for t, s in pairs.items())


def left_out(model: Any, contents: Mapping[str, object], *, untied: bool = False) -> dict[str, str] | None:
    """Return which names a file may lack: name → the name that has its values. `untied`: the configuration
    in the files says that nothing is tied. None: see `declared`."""
    pairs = declared(model)
    if pairs is None:
        return None
    found = {}
    for name in () if untied else pairs:
        source, seen = name, {name}
        while source in pairs and pairs[source] not in seen:
            if name not in contents or contents.get(pairs[source]) != contents[name]:
                break
            source = pairs[source]
            seen.add(source)
        if source != name:
            found[name] = source
    return found


def corrected(model: Any, config: Mapping[str, Any], contents: Mapping[str, object]) -> dict[str, Any]:
    """Return a configuration, as values, that ties what is tied; see [Note: ties in files]."""
    pairs = declared(model)
    if pairs is None or config.get("is_encoder_decoder"):
        return dict(config)
    if contradicts(model, contents):
        return _untied(config)
    off = getattr(getattr(model, "config", None), TIED, None) is False
    if off and len(set(contents.values())) < len(contents):
        return {**config, TIED: False}  # the program has tied by itself what transformers does not tie
    return dict(config)


def is_untied(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration says that nothing is tied."""
    return config.get(TIED) is False and not config.get("is_encoder_decoder")


def _untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Composite models take the setting of a part of theirs where it is true."""
    inner = {k: _untied(v) for k, v in config.items() if isinstance(v, Mapping) and v.get(TIED)}
    return {**config, **inner, TIED: False}
