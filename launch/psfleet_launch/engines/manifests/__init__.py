"""Templates of the objects of a job on Kubernetes, which `engines/kubernetes.py` fills in."""
