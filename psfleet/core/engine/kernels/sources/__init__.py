"""Texts of kernels. `psfleet.core.engine.kernels.generate` reads and fills them; nothing imports them.

A .py file is compiled as it stands, or with its DIM replaced; a .txt file is a `string.Template`, into which
the text of a rule or policy goes. Read index.py, then push.txt first.
"""
