"""The command as a whole: help, versions, wrong usage, and how errors and warnings are shown."""

import subprocess
import sys
import warnings

import click
import pytest
from click.testing import CliRunner

import cuflash
from cuflash.cli import main
from cuflash.errors import CacheWarning, CompileError, ErrorCode

COMMANDS = [
    "demo",
    "compile",
    "env",
    "cache",
    "cache dir",
    "cache list",
    "cache clear",
    "cache prune",
    "bench",
    "check",
    "dev",
    "show",
    "tune",
    "tune list",
    "tune show",
    "tune export",
    "tune import",
    "tune diff",
    "tune reset",
]


def run(*arguments, **options):
    return CliRunner().invoke(main, list(arguments), **options)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0 and result.stdout.startswith("Usage: ")


def test_version():
    result = run("--version")
    assert result.exit_code == 0 and cuflash.__version__ in result.stdout


def test_every_command_is_tested_here():
    groups = {name for name, command in main.commands.items()}
    assert groups == {command.split()[0] for command in COMMANDS}


@pytest.mark.parametrize(
    "arguments",
    [
        ["attend"],
        ["--no-such-option"],
        ["demo", "--dtype", "int8"],
        ["demo", "--seqlen", "0"],
        ["demo", "--head-dim", "x"],
        ["compile", "--head-dim", "257"],
        ["compile", "--all", "--dtype", "fp16"],
        ["compile", "--all", "--ptx"],
        ["compile", "--ptx", "--sass"],
        ["compile", "--ptx", "--head-dim", "64", "--head-dim", "128"],
        ["compile", "--vector-bytes", "3"],
        ["cache", "prune"],
        ["cache", "prune", "--max-size", "many"],
        ["cache", "prune", "--older-than", "30"],
        ["env", "surplus"],
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_usage_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == "" and "Error: " in result.stderr and "Traceback" not in result.stderr


@pytest.fixture
def failing():
    """A command that warns, then fails as the library does."""

    @click.command("failing")
    def command():
        warnings.warn("the disk is full", CacheWarning, stacklevel=1)
        raise CompileError("kernels_cu/x.cu(3): error", log="long", source_path="kernels_cu/x.cu")

    main.add_command(command)
    yield
    del main.commands["failing"]


def test_an_error_is_one_message_with_its_code(failing):
    result = run("failing")
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.splitlines() == [
        "warning: the disk is full",
        f"error COMPILE_ERROR ({int(ErrorCode.COMPILE_ERROR)}): kernels_cu/x.cu(3): error",
    ]


@pytest.mark.filterwarnings("ignore::cuflash.CacheWarning")
def test_debug_lets_the_error_through(failing):
    assert isinstance(run("--debug", "failing").exception, CompileError)


def test_python_m_cuflash():
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "--version"], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.startswith("cuflash, version")


def test_python_m_cuflash_exits_with_the_commands_code():
    done = subprocess.run(
        [sys.executable, "-m", "cuflash", "cache", "prune"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
