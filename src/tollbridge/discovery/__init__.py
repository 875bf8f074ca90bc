"""Who serves: a list, a file that is read again, DNS, or the pods of a Kubernetes cluster. docs/discovery.md."""
