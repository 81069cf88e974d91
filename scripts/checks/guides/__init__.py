"""The pages of docs/guides, run as they are written."""
