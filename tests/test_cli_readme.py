"""The README says nothing that is not so: its examples run, and its commands exist."""

import importlib.util
import os
import re
import shlex
from pathlib import Path

import click
import pytest

from cuflash import settings
from cuflash.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def examples():
    for number, text in enumerate(blocks("python"), start=1):
        gpu = "import cupy" in text or "import torch" in text
        marks = [pytest.mark.gpu] if gpu else []
        yield pytest.param(text, id=f"example{number}", marks=marks)


@pytest.mark.parametrize("text", list(examples()))
def test_example_runs(text):
    if "import torch" in text and importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    exec(compile(text, "README.md", "exec"), {})


def test_examples_are_found():
    assert len(blocks("python")) >= 5 and any("numpy" in text for text in blocks("python"))


def command_lines():
    texts = blocks("sh") + re.findall(r"`(cuflash [^`]*)`", README)
    for text in texts:
        for line in re.split(r"\n|&&|\|", text):
            if line.strip().startswith("cuflash"):
                yield line.strip()


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_command_is_parsed(line):
    command, words = main, shlex.split(line)[1:]
    while isinstance(command, click.Group) and words:
        command = command.commands[words.pop(0)]
    if words != ["--help"]:
        command.make_context("cuflash", words, resilient_parsing=isinstance(command, click.Group))


@pytest.mark.parametrize("marker", ["demo", "test"])
def test_ci_finds_its_commands(marker):
    assert re.search(rf"^<!-- command: {marker} -->\n```sh\n.+\n```$", README, re.MULTILINE)


def test_every_setting_is_in_the_table():
    for setting in settings.SETTINGS:
        assert f"| `{setting.name}` |" in README
    assert set(re.findall(r"CUFLASH_\w+", README)) == {s.name for s in settings.SETTINGS}


@pytest.mark.parametrize("path", [ROOT / "README.md", *DOCS], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert os.path.exists(path.parent / target), target


def test_files_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:cuflash|kernels_cu|tests)/[\w/.]+)`", text)
    assert named
    for name in named:
        assert (ROOT / name).exists(), name
