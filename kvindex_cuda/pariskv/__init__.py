"""The fused executor of one index: ParisKV."""
