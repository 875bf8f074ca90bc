"""From the cluster file to Kubernetes objects, and a judge of such objects. Nothing here talks to a cluster."""
