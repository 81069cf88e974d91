"""New tokens as text: what tokens stand for, the text that continues a prompt's, and stop strings in it."""
