"""A real browser on a real JupyterLab, both made anew for each test and gone after it."""

import os
import shutil
from pathlib import Path

import pytest
from jupyterlab_page import Lab, server

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.slow)


def _absent(what: str) -> None:
    """Leave the tests out where nobody promised a browser; CI did."""
    pytest.fail(f"{what}, and CI must not pass without") if os.environ.get("CI") else pytest.skip(what)


@pytest.fixture(scope="session")
def chromium():
    """A browser that runs for the whole session; pages come in contexts that share nothing."""
    try:
        from playwright import sync_api
    except ImportError:
        _absent("playwright is not installed -> make")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        _absent(f"no browser: none of {', '.join(NAMES)} is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def lab(tmp_path, chromium, request):
    """`lab.open(notebook)`: JupyterLab in a page, its server on loopback with folders of its own below tmp_path."""
    with server(tmp_path) as url:
        context = chromium.new_context(viewport={"width": 1600, "height": 1000})
        lab = Lab(context.new_page(), url, tmp_path)
        yield lab
        lab.shot(request.node.name)  # to be looked at after a failure
        context.close()
