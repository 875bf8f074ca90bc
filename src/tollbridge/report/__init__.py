"""Documents of figures and tables: one HTML file, or a terminal. Knows nothing of what was measured."""
