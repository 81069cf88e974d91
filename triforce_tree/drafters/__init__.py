"""Who proposes token trees: the contract (``base``), the draft model, prompt lookup."""
