"""What a request costs: prefill, decode and link models, fitted online, seeded by a calibration; the toll. Pure."""
