"""Which part of a call goes to which server, and back."""
