"""The protocol, and what every other room builds on."""
