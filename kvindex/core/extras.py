"""How to install the optional packages of kvindex, for error messages."""


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra, as part of a sentence.

    Both forms work without a package index that has kvindex.
    """
    return (
        f'pip install -e ".[{extra}]" in a checkout of kvindex, or '
        f'pip install "FILE.whl[{extra}]" with its wheel'
    )
