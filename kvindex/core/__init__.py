"""The index protocol, and the foundations that all other packages build on."""
