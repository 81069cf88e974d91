"""What a generation's memory plan is made from."""
