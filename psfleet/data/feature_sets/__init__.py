"""Feature work: describes a model's features once, and makes ids and numbers of a batch's raw values.

Read feature_set.py first, then feature_batches.py (raw values to typed and transformed ones) and
feature_lookup.py (ids, pooled rows and gradients). `psfleet.features` exports the public names.
"""
