"""Block hash chain, block pool and prefix cache: pure objects shared by engine, router and simulator."""
