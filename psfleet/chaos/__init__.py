"""What processes of a job under `psfleet-launch --chaos` do: inject faults, and audit their pushes."""
