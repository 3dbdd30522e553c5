import pytest

from tests.cuda.devices import DEVICES, on


@pytest.fixture(params=DEVICES)
def device(request):
    """Where tensors lie; on a CPU the kernels are emulated."""
    with on(request.param):
        yield request.param
