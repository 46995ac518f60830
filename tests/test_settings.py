from __future__ import annotations

import logging
import re
import warnings
from pathlib import Path

import pytest

import cuflash
from cuflash import log, settings
from cuflash.errors import InvalidConfigError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert settings.cache_dir() == Path("/home/someone/.cache/cuflash")
    assert settings.kernel_dir() is None
    assert settings.config() is None
    assert settings.log_level() is None
    assert settings.nvrtc_flags() == []
    assert not (settings.no_cache() or settings.no_jit() or settings.sync())


def test_every_variable_is_read_in_settings_and_documented_there() -> None:
    package = Path(cuflash.__file__).parent
    source = (package / "settings.py").read_text()
    documented = {setting.name for setting in settings.SETTINGS}
    assert set(re.findall(r'"(CUFLASH_\w+)"', source)) == documented
    for path in package.rglob("*.py"):
        if path.name not in ("settings.py",):
            read = re.findall(r"(?:environ|getenv)\W+(?:get\W+)?(CUFLASH_\w+)", path.read_text())
            assert not read, path


def test_cache_dir_follows_the_environment_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert settings.cache_dir() == Path("/xdg/cuflash")
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/mine")
    assert settings.cache_dir() == Path("/home/someone/mine")


def test_a_relative_xdg_folder_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert settings.cache_dir() == Path("/home/someone/.cache/cuflash")


def test_kernel_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", "~/kernels")
    assert settings.kernel_dir() == Path("/home/someone/kernels")


@pytest.mark.parametrize(
    ("value", "on"),
    [("1", True), ("yes", True), ("0", False), ("", False), ("False", False), ("off", False)],
)
def test_switches(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    for name in ("CUFLASH_NO_CACHE", "CUFLASH_NO_JIT", "CUFLASH_SYNC"):
        monkeypatch.setenv(name, value)
    assert settings.no_cache() is on
    assert settings.no_jit() is on
    assert settings.sync() is on


def test_nvrtc_flags_are_split_as_a_shell_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-G  '-I/a b/c'")
    assert settings.nvrtc_flags() == ["-G", "-I/a b/c"]
    monkeypatch.setenv("CUFLASH_NVRTC_FLAGS", "-D'X")
    with pytest.raises(InvalidConfigError, match=r"CUFLASH_NVRTC_FLAGS is \"-D'X\""):
        settings.nvrtc_flags()


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    logger = logging.getLogger("cuflash")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    return logger


def test_logging_is_left_to_the_program(logger: logging.Logger) -> None:
    log.start()
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    assert logger.level == logging.NOTSET


def test_log_level_writes_to_stderr(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_LOG", "info")
    log.start()
    logger.info("a kernel was compiled")
    logger.debug("too much")
    written = capsys.readouterr().err
    assert "cuflash INFO: a kernel was compiled" in written
    assert "too much" not in written


def test_a_wrong_log_level_is_a_warning(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUFLASH_LOG", "chatty")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.start()
    assert ["CHATTY" in str(warning.message) for warning in caught] == [True]
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
