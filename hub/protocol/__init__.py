"""What goes over the network between a hub and its clients: messages, without any I/O."""
