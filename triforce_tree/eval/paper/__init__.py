"""The tables and figures of TriForce (Sun et al., arXiv 2404.11912) beside measurements of any pair."""
