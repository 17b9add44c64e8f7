"""Running programs: the executor, inference models and files of models."""
