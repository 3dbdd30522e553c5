"""How to install the optional packages of kvindex, for error messages."""


def how_to_install(extra: str) -> str:
    """Return two alternative commands that install the optional packages `extra` of kvindex.

    The first command installs from a checkout, and the second one from a wheel. Neither of them
    needs kvindex on PyPI. The result is a part of a sentence, for error messages.
    """
    return (
        f'pip install -e ".[{extra}]" in a checkout of kvindex, or '
        f'pip install "FILE.whl[{extra}]" with its wheel'
    )
