"""Is a split worth it here: from model, measured engine and link, workload and SLOs to a verdict, with its terms."""
