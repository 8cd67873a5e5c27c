"""Common parts of the tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import afresh
import pytest


def pytest_configure() -> None:
    """Lets tests interrupt themselves also in a background job, which a shell starts with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def js() -> afresh.Warm:
    return afresh.warm("js")


@pytest.fixture
def sb(js: afresh.Warm) -> Iterator[afresh.Sandbox]:
    with js.sandbox(timeout=60) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def python() -> afresh.Warm:
    """The host's own interpreter as a Linux program."""
    try:
        return afresh.linux("python3", setup="import os, subprocess, threading, time\nwarm = 41")
    except afresh.OpenError as error:
        if "this host cannot run Linux guests" in str(error):
            pytest.skip(f"SKIPPED: {error}")
        raise


@pytest.fixture
def box(python: afresh.Warm) -> Iterator[afresh.Sandbox]:
    """A sandbox of it."""
    with python.sandbox(timeout=60) as sandbox:
        yield sandbox


@pytest.fixture
def alone() -> Callable[[str], str]:
    """Runs a program in a new Python process, and returns its output."""

    def run(program: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
