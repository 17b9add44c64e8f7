"""What engines have in common whose processes run on other machines, each under an agent."""
