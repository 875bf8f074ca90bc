"""Measures an engine and a link from outside, and writes the calibration that cost model and planner start from."""
