"""Steps: what one decoded token costs a layer, as launches of kernels."""
