"""What `hub.server` is made of: the gate in front, who calls, what comes in and what goes out."""
