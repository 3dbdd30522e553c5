import pytest

from kvindex.selectors import PooledSelector, create
from kvindex.selectors.named import SELECTORS


def test_a_selector_is_created_from_its_name_and_options():
    selector = create("pooled:mass=0.7")
    assert isinstance(selector, PooledSelector)
    assert selector.mass == 0.7
    assert isinstance(create("pooled"), PooledSelector)
    assert create("pooled:mass=1").mass == 1


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_has_defaults(name):
    assert type(create(name)) is SELECTORS[name]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("poled", "selector: got 'poled', allowed is one of .*did you mean 'pooled'"),
        ("pooled:mas=1", "option of the selector 'pooled': got 'mas'.*did you mean 'mass'"),
        ("pooled:mass", "mass: got '', allowed is a number"),
        ("pooled:mass=much", "mass: got 'much', allowed is a number"),
        ("pooled:mass=2", "mass: got 2, allowed is"),
        (3, "selector: got 3, allowed is a string"),
    ],
)
def test_a_wrong_spec_raises(spec, message):
    with pytest.raises(ValueError, match=message):
        create(spec)
