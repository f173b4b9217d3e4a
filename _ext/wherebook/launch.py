"""What the header of a page with cells offers: its notebook for download, and in Colab if the site is published."""

from __future__ import annotations

import os
import re
from typing import Any

from markupsafe import Markup
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError
from sphinx.util.osutil import relative_uri

from wherebook.notebooks import is_notebook, notebook_path

REPOSITORY = re.compile(r"https://github\.com/([\w-]+/[\w.-]+?)(?:\.git)?/?", re.ASCII)
BRANCH = re.compile(r"[\w.-]+", re.ASCII)  # in an address, what follows a slash would be a folder


def colab_address(url: str, branch: str, notebook: str) -> str:
    """Where Colab opens a notebook that lies on a branch of a repository on GitHub.

    >>> colab_address("https://github.com/reader/book", "gh-pages", "notebooks/01_graphs.ipynb")
    'https://colab.research.google.com/github/reader/book/blob/gh-pages/notebooks/01_graphs.ipynb'
    """
    repository = REPOSITORY.fullmatch(str(url))
    if not repository:
        raise ConfigError(
            f"Open in Colab: the repository is {url!r}, expected https://github.com/OWNER/REPOSITORY. "
            'Correct repository.url in _config.yml, or leave it empty (""), and pages offer the download alone. '
            "In CI, where BOOK_PUBLISHES_TO is set, it is GITHUB_SERVER_URL/GITHUB_REPOSITORY."
        )
    if not BRANCH.fullmatch(str(branch or "")):
        raise ConfigError(
            f"Open in Colab: the published branch is {branch!r}, expected a name without slashes, such as gh-pages. "
            "Correct published_branch in _config.yml, or BOOK_PUBLISHES_TO in CI."
        )
    return f"https://colab.research.google.com/github/{repository[1]}/blob/{branch}/{notebook}"


def published(config: Config) -> tuple[str, str]:
    """The repository and the branch of the published site, or "" for none.

    CI that publishes knows them better than _config.yml, which a fork copies together with the name of another.
    """
    branch = os.environ.get("BOOK_PUBLISHES_TO")
    if branch:
        server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
        return f"{server}/{os.environ.get('GITHUB_REPOSITORY', '')}", branch
    return config.html_theme_options.get("repository_url") or "", config.published_branch


def check_published(app: Sphinx, config: Config) -> None:
    """A wrong address is an error before any chapter runs, not a link that fails in a reader's hands."""
    url, branch = published(config)
    if url:
        colab_address(url, branch, "")
    config.html_theme_options["launch_buttons"] = {}  # the theme's lead to the chapters' sources, which nothing opens


def offer_notebook(app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    if not is_notebook(app, pagename) or "book_buttons" not in context:
        return
    notebook = notebook_path(pagename)
    url, branch = published(app.config)
    if url:
        # on a narrow screen, its last word is shown
        text = Markup('<span class="wide">Open in </span>Colab')
        colab = {"url": colab_address(url, branch, notebook), "text": text, "icon": "open", "label": "open-in-colab"}
        context["book_buttons"].append(colab)
    here = relative_uri(app.builder.get_target_uri(pagename), notebook)
    download = {"url": here, "text": "Download notebook", "icon": "download", "label": "download-notebook"}
    context["book_buttons"].append(download)


def setup(app: Sphinx) -> None:
    app.add_config_value("published_branch", "gh-pages", "html")
    app.connect("config-inited", check_published)
    app.connect("html-page-context", offer_notebook, priority=900)  # after the list was made
