"""Build the package with a README in which each relative link is replaced by the link's text.

PyPI shows the README without the files of the repository, so relative links would not work there.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"!?\[([^]]*)\]\((?!\w+:|#)[^)\s]+\)", r"\1", README),
    long_description_content_type="text/markdown",
)
