"""Simulator against reality: calibrate, predict, commit, run, judge."""
