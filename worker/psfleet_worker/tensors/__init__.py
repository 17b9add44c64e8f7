"""Tensors of one worker on their way: split by server, sent in the order of its stream, and whole tables."""
