"""What was saved is loaded: indexes by the registry's names, and layers around them."""
