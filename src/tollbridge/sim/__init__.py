"""A discrete-event simulator that runs the production scheduler, block pool, index, cost model and policies."""
