"""Where a job can be watched: the metrics of all its processes, and a page that shows them."""
