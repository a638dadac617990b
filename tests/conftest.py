"""Shared fixtures, and in CI the rule that a skip is a failure where the shared folder lies beside the checkout.

Tests marked `gpu` or `compiled` may be skipped even there: they need hardware.
"""

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


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiled") is not None:
        from paceline.decode.native.build import availability

        if missing := availability().missing:
            pytest.skip(f"no compiled decoder here: {missing}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):  # type: ignore[no-untyped-def]
    report = yield
    strict = os.environ.get("CI") == "true" and shared_folder().is_dir()
    excused = any(item.get_closest_marker(name) for name in ("gpu", "compiled"))
    if strict and report.skipped and not hasattr(report, "wasxfail") and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"
    return report
