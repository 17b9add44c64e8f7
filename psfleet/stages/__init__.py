"""The stages of a pipeline: where this process stands among them, and who works on what when."""
