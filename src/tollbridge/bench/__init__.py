"""Measures servers as their clients see them: schedules, an open-loop client, paired statistics, ready experiments."""
