import pytest

from tests.cuda.devices import DEVICES, on


@pytest.fixture(params=DEVICES)
def device(request):
    """The device of the tensors. On a CPU, kernels are emulated."""
    with on(request.param):
        yield request.param
