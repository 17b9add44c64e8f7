"""Common parts of engines whose processes run on other machines, each under an agent."""
