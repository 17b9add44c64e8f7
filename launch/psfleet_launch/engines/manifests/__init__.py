"""Templates of Kubernetes objects. `engines/kubernetes.py` inserts the values of a job."""
