"""Features: the declaration of a model's features, and the conversion of raw values to ids and numbers.

To understand the code, begin with feature_set.py (declarations). Then read feature_values.py (types),
applying_transforms.py and feature_lookup.py (ids, pooled rows and gradients). `psfleet.features` exports
the public names.
"""
