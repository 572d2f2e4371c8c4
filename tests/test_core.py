"""Errors, sizes and the configuration."""

from __future__ import annotations

import dataclasses
import errno
import inspect
import math
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity.core import errors
from infinity.core.config import Config
from infinity.core.errors import ConfigError, DirectoryError, InfinityError, OutOfMemoryError
from infinity.core.sizes import Tier, dtype_name, format_size, parse_dtype, parse_size
from infinity.core.system_errors import reason
from infinity.core.threads import start

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, InfinityError)]


# -- errors ---------------------------------------------------------------------------------


def test_every_error_is_exported_and_drawn_in_the_tree() -> None:
    assert sorted(c.__name__ for c in CLASSES) == sorted(errors.__all__)
    for c in CLASSES:
        assert f" {c.__name__} " in f" {errors.__doc__} ".replace("\n", " "), c


def test_an_error_says_what_was_expected_found_and_what_to_change() -> None:
    for cls in CLASSES:
        error = cls("a thing is wrong", expected="this", found="that", cure="change it")
        assert str(error).splitlines() == [
            "a thing is wrong",
            "  expected: this",
            "  found: that",
            "  to change: change it",
        ]
        said = ("a thing is wrong", "this", "that", "change it")
        assert (error.what, error.expected, error.found, error.cure) == said
        assert str(cls("only this")) == "only this"


def test_an_error_of_the_system_names_the_limit_that_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {resource.RLIMIT_NOFILE: (50, 4096), resource.RLIMIT_AS: (3 << 20, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda limit: limits.get(limit, (resource.RLIM_INFINITY,) * 2))
    error = DirectoryError("no", errno=errno.EMFILE, expected="a directory", found="no", cure="make one")
    assert error.cure == "raise the limit on open files of a process: ulimit -n"
    assert str(error.found).startswith("Too many open files (the limit")
    assert error.expected is None
    assert "ulimit -v" in reason(errno.ENOMEM)
    monkeypatch.setattr(threading, "_start_new_thread", lambda *_: start_no_thread())
    with pytest.raises(OutOfMemoryError, match="refused the thread 'mine'") as caught:
        start(threading.Thread(name="mine"))
    assert "ulimit -v" in str(caught.value.cure)
    limits.clear()
    assert reason(errno.ENOMEM) == "Cannot allocate memory"


def start_no_thread() -> None:
    raise RuntimeError("can't start new thread")


def test_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.ReleasedParameterError, RuntimeError)
    assert issubclass(errors.BuildError, ImportError)
    full = errors.DirectoryError("full", errno=28, path="/x", offset=4096, nbytes=10)
    assert isinstance(full, OSError)
    assert (full.errno, full.path, full.offset, full.nbytes) == (28, "/x", 4096, 10)


# -- sizes ----------------------------------------------------------------------------------


def test_parse_size() -> None:
    texts = {
        "1234": 1234,
        "1KiB": 1024,
        "1.5 kib": 1536,
        "2 GB": 2 * 10**9,
        " 3tb ": 3 * 10**12,
        "7B": 7,
    }
    assert [parse_size(text) for text in texts] == [*texts.values()]
    wrong: list[Any] = [-1, True, 1.5, None, "GiB", "-1GiB", "1 XB", "1e9", "1,5GiB"]
    for each in wrong:
        with pytest.raises(ConfigError, match="host_memory is not a size") as caught:
            parse_size(each, "host_memory")
        assert caught.value.found == repr(each)


def test_sizes_and_dtypes_as_text() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, -(1 << 30))] == ["0 B", "1023 B", "1.50 KiB", "-1.00 GiB"]
    for name in ("bf16", "bfloat16", "torch.bfloat16", "BF16", torch.bfloat16):
        assert parse_dtype(name) is torch.bfloat16
    assert dtype_name(torch.bfloat16) == "bf16"


# -- config ---------------------------------------------------------------------------------


def test_defaults_are_a_configuration() -> None:
    config = Config()
    assert config.directories == ()
    assert config.compute_dtype is None  # each parameter keeps its own
    assert config.placements == {
        "parameters": {Tier.DEVICE: 1.0},
        "optimizer_state": {Tier.HOST: 1.0},
        "gradients": {Tier.HOST: 1.0},
    }


def test_the_settings_are_few_and_each_has_a_line_in_the_docstring() -> None:
    names = [field.name for field in dataclasses.fields(Config) if field.init]
    assert len(names) <= 26
    for name in names:
        assert f"        {name}: " in (Config.__doc__ or ""), name


def test_values_are_parsed(tmp_path: Path) -> None:
    config = Config(
        nvme=[tmp_path / "a", str(tmp_path / "b")],
        device="cpu",
        device_memory="1GiB",
        host_memory=5,
        dtype="fp32",
        parameters="nvme",
        optimizer_state={"host": 0.25, "nvme": 0.75},
        units="Block",
    )
    assert config.directories == (str(tmp_path / "a"), str(tmp_path / "b"))
    assert (config.device_memory, config.host_memory) == (1 << 30, 5)
    assert config.dtype == "fp32"
    assert config.compute_dtype is torch.float32
    assert config.placements["optimizer_state"] == {Tier.HOST: 0.25, Tier.NVME: 0.75}
    assert config.units == ("Block",)
    assert config.replace(host_memory="6B").host_memory == 6


def test_it_is_frozen_and_takes_keywords_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().dtype = "fp32"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config("/nvme")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "what", "cure"),
    [
        ({"host_memroy": 1}, "unknown setting 'host_memroy'", "did you mean 'host_memory'?"),
        ({"parameters": "nvme"}, "no directory is named", "nvme="),
        ({"parameters": "nmve"}, "unknown tier", "did you mean 'nvme'?"),
        ({"parameters": {"host": 0.5}}, "shares of parameters", "0.3"),
        ({"parameters": {"host": True}}, "shares of parameters", "0.3"),
        ({"update": "delayd"}, "update mode", 'update="delayed"'),
        *(({"device": name}, "unknown device", "cuda") for name in ("tpu", "cuda:", "cuda:-1", "CUDA", "")),
        ({"dtype": "fp64"}, "unknown compute dtype", "bf16"),
        ({"aio_backend": "libaoi"}, "unknown I/O backend", 'aio_backend="libaio"'),
        ({"max_grad_norm": math.nan}, "max_grad_norm cannot be used", "max_grad_norm=1.0"),
        ({"loss_scale": 3.0}, "loss_scale cannot be used", "65536"),
        ({"chunk_elements": 65_537}, "chunk_elements cannot be used", "chunk_elements="),
        ({"block_bytes": "1TiB"}, "block_bytes cannot be used", "block_bytes=None"),
        ({"queue_depth": 4097}, "queue_depth cannot be used", "queue_depth=None"),
        ({"threads": 0}, "threads cannot be used", "threads="),
        ({"units": ["Block", nn.Linear]}, "units names no module", "units="),
        ({"optimizer_state_fp32": None}, "optimizer_state_fp32 names no parameter", '["*norm*"]'),
        ({"nvme": []}, "names no directory", "nvme="),
        ({"nvme": {"/mnt/a": 0.3, "/mnt/b": 0.7}}, "names no directory", "nvme="),
        ({"nvme": "a\0b"}, "names no directory", "nvme="),
        ({"nvme": ["/x", "/x/../x"]}, "named twice", "once"),
        ({"host_memory": "lots"}, "host_memory is not a size", "20GiB"),
    ],
)
def test_refused(settings: dict[str, Any], what: str, cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert what in str(caught.value)
    assert caught.value.cure is not None
    assert cure in caught.value.cure
    assert caught.value.expected is not None
    assert caught.value.found is not None


def test_a_file_says_the_same_as_keywords(tmp_path: Path) -> None:
    settings = {"nvme": str(tmp_path), "parameters": {"host": 0.3, "nvme": 0.7}, "dtype": "fp16"}
    body = f"nvme: {tmp_path}\nparameters: {{host: 0.3, nvme: 0.7}}\ndtype: fp16\n"
    plain, section = tmp_path / "plain.yaml", tmp_path / "section.yaml"
    plain.write_text(body)
    section.write_text("model: {width: 8}\nengine:\n" + "".join(f"  {line}\n" for line in body.splitlines()))
    assert Config.load(plain) == Config.load(section) == Config(**settings)
    (tmp_path / "empty.yaml").touch()
    assert Config.load(tmp_path / "empty.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (None, "cannot read"),
        ("a: [", "cannot read"),
        ("- 1", "has no settings"),
        ("dtyp: fp32", "unknown setting"),
    ],
)
def test_a_file_that_cannot_be_used(text: str | None, what: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        Config.load(path)
