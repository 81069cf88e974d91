"""The choice of each pass: how many levels it has and how many rounds, from stage costs and acceptance."""
