"""The README for a package index: a relative link would lead nowhere there, so its text remains."""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=re.sub(r"!?\[([^]]*)\]\((?!\w+:|#)[^)\s]+\)", r"\1", README),
    long_description_content_type="text/markdown",
)
