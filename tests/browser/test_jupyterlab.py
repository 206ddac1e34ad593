"""A real JupyterLab in a real browser: a notebook runs, and a slider answers."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gaac_lab import paths

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def lab(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab over a copy of the notebooks."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(paths.notebooks_dir(), root / "notebooks")
    notebook = root / "notebooks" / "01_budget.ipynb"
    source = notebook.read_text()
    assert source.count('out_dir = \\"\\"') == 1
    notebook.write_text(source.replace('out_dir = \\"\\"', f'out_dir = \\"{root / "run"}\\"'))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = root / "settings"
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}",
        "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=",
        "--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={root}",
        "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "GAAC_LAB_HOME": str(paths.project_root()),
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(root / "workspaces"),
    }
    with (root / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            _wait(f"http://127.0.0.1:{port}/api", root / "log", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(30)


def _wait(address: str, log: Path, server: subprocess.Popen[bytes]) -> None:
    for _ in range(120):
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(address, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)")
def test_the_budget_notebook_runs_and_its_slider_answers(lab: str, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        page = browser.new_page(viewport={"width": 1400, "height": 2400})
        page.goto(f"{lab}/lab/tree/notebooks/01_budget.ipynb", timeout=120_000)
        # The menu answers before the notebook is there, and then knows no cells to run.
        page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=120_000)
        page.locator(".jp-NotebookPanel-toolbar").get_by_text("Python 3").wait_for(timeout=60_000)
        page.locator(".lm-MenuBar-itemLabel", has_text="Run").click()
        page.locator(".lm-Menu-itemLabel", has_text=re.compile("^Run All Cells$")).click()
        result = page.locator(".widget-html-content, .jupyter-widgets.widget-html")
        result.filter(has_text="GiB").first.wait_for(timeout=180_000)
        assert "4.00 GiB" in result.filter(has_text="GiB").first.inner_text()

        # A busy kernel answers no control, so the run comes to its end first.
        page.get_by_text(re.compile("lossless can save at best")).first.wait_for(timeout=300_000)
        batch = page.locator(".widget-hslider", has_text="batch").locator(".widget-readout")
        batch.fill("4")
        batch.press("Enter")
        result.filter(has_text="16.00 GiB").first.wait_for(timeout=60_000)
        assert page.locator(".jp-RenderedText[data-mime-type*='error']").count() == 0
        page.screenshot(path=str(tmp_path / "01_budget.png"))
        browser.close()
