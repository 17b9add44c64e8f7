"""The servers as one worker calls them."""
