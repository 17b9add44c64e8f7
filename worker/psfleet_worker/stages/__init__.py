"""Messages between the stages of one worker."""
