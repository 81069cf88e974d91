"""One generation: its sequences begin and end in the slots of a running batch."""
