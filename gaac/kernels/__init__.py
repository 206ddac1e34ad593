"""Ways to run a level on one machine or another; `reference` is the oracle they are tested by."""
