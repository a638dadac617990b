"""The page in a real browser, where one is installed: it draws, and hovering tells the point."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from paceline.plan.planner import PlanRequest, make_plan
from paceline.report.plan_html import plan_page

HOVER = """<script>addEventListener("load", () => {
  const svg = document.querySelector("#frontier svg");
  const star = svg.querySelector("[data-star]").getBoundingClientRect();
  const at = {clientX: star.left + star.width / 2, clientY: star.top + star.height / 2};
  svg.dispatchEvent(new MouseEvent("mousemove", at));
  document.body.dataset.tip = document.getElementById("tip").textContent;
});</script></body>"""


def _browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    pytest.skip("no Chromium is installed")


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3-30b-a3b"])
def test_the_page_draws_and_answers_the_pointer(model: str, tmp_path: Path) -> None:
    browser = _browser()
    plan = make_plan(PlanRequest(model, "h200", drafts=(("eagle3", "AL:2.6@4"),), concurrency=64))
    page = tmp_path / "plan.html"
    page.write_text(plan_page(plan).replace("</body>", HOVER), encoding="utf-8")
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=2000",
        "--dump-dom",
    ]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=60, check=True)
    dom = done.stdout
    assert dom.count("<svg") == (6 if model.startswith("qwen") else 5)
    assert "NaN" not in dom
    assert "undefined" not in dom.split("<script")[0]
    tip = html.unescape(re.search(r'data-tip="([^"]*)"', dom)[1])
    assert re.search(r"batch \d+, D = \d+", tip)
    assert "tokens/s/user" in tip
