"""Examines a running cluster: what is reachable, what fits together, and whether a split really happens.

findings.py  what was found, one sentence each      worker.py  one worker by itself
targets.py   who is examined                        pair.py    prefill and decode together, and a verified split
"""
