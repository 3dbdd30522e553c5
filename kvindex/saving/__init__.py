"""Loading of saved indexes and layers."""
