"""Shared fixtures, and in CI the rule that a skip is a failure where the shared folder lies beside the checkout."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def shared_folder() -> Path:
    """The folder of workloads and cases: beside the checkout, or where PACELINE_SHARED says."""
    return Path(os.environ.get("PACELINE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def shared() -> Path:
    folder = shared_folder()
    if not folder.is_dir():
        pytest.skip(f"the shared folder is not at {folder}; set PACELINE_SHARED")
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]
    report = yield
    strict = os.environ.get("CI") == "true" and shared_folder().is_dir()
    if strict and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
    return report
